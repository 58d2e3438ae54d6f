"""Toy trainings with callbacks, and a comparison of two trainings to the last bit."""

import torch
from lightning.fabric import Fabric

from lit_rlkv.callbacks.hooks import check_hooks
from lit_rlkv.experience.advantages import GAEAdvantage, PairAdvantage
from lit_rlkv.models.layouts import ROLES
from lit_rlkv.trainer import train
from tests.callbacks.gradients import DISTILLATION
from tests.hand_built import (
    ARMS,
    MetricLog,
    make_datamodule,
    make_dpo,
    make_module,
    make_ppo,
    make_roles,
    shift,
)

ALGORITHMS = {
    "grpo": {},
    "ppo": {
        "make": make_ppo,
        "advantage": GAEAdvantage(1.0, 0.95),
        "learner_parts": (("policy",), ("value",)),
    },
    "online_dpo": {"make": make_dpo, "advantage": PairAdvantage(drop_ties=False)},
}


def measured(diagnostic, roles, experience, arm="shadow"):
    """Return the scalars and arrays that a diagnostic finds in a rollout, as the loop would ask for them."""
    diagnostic.on_fit_start(None, make_module(roles, replays=ARMS[arm].replays))
    diagnostic.on_rollout_end(experience)
    metrics: dict[str, float] = {}
    diagnostic.on_iteration_end(1, 1, metrics)
    assert metrics.pop(f"time/diagnostics/{diagnostic.name}") > 0
    return metrics, diagnostic.arrays


def trained(
    diagnostics,
    make=make_module,
    arm="shadow",
    precision="32-true",
    layout="hydra",
    accelerator="cpu",
    distills=False,
    **options,
):
    """Train two iterations; return the rows of metrics, the final parameters and the state of torch's RNG."""
    torch.manual_seed(3)
    roles = shift(make_roles(layout, needed=ROLES if make is make_ppo else ("policy", "reference")))
    fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    roles.to(fabric.device)
    module = make(roles, replays=ARMS[arm].replays)
    datamodule = make_datamodule(roles, correction=ARMS[arm], **options)
    module.loss_terms = [DISTILLATION.loss_terms] if distills else []
    log = MetricLog()
    callbacks = [*diagnostics, log]
    check_hooks(callbacks)
    datamodule.callbacks = callbacks
    train(fabric, module, datamodule, callbacks=callbacks, n_iterations=2, max_grad_norm=1.0)
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    return log.rows, parameters, torch.get_rng_state()


def assert_same_training(plain, measured):
    """Parameters, random state and metrics agree to the last bit, except times and added metrics."""
    (rows, parameters, state), (measured_rows, measured_parameters, measured_state) = plain, measured
    for row, measured_row in zip(rows, measured_rows, strict=True):
        names = [name for name in row if not name.startswith("time/")]
        assert {name: row[name] for name in names} == {name: measured_row[name] for name in names}
    assert all(torch.equal(value, measured_parameters[name]) for name, value in parameters.items())
    assert torch.equal(state, measured_state)
