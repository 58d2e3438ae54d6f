"""A toy rollout, and what the gradient diagnostics find in it."""

from dataclasses import dataclass

import torch

from lit_rlkv.callbacks.diagnostic import Diagnostic
from lit_rlkv.callbacks.shadow_distillation import ShadowDistillation
from lit_rlkv.experience.advantages import GAEAdvantage, GroupAdvantage, PairAdvantage
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.datamodule import RolloutDataModule
from lit_rlkv.models.layouts import ROLES
from lit_rlkv.modules.base import PolicyModule
from tests.hand_built import (
    ARMS,
    make_datamodule,
    make_dpo,
    make_module,
    make_ppo,
    make_roles,
    shift,
)

DISTILLATION = ShadowDistillation("sparse_student", 0.3, "reference", anchor_weight=0.2)


@dataclass(frozen=True)
class Run:
    module: PolicyModule
    data: RolloutDataModule
    experience: Experience


def make_run(
    algorithm: str = "grpo",
    arm: str = "shadow",
    *,
    layout="hydra",
    checkpoints=False,
    distils=False,
    **options,
) -> Run:
    """A rollout of eight prompts by a policy that has left its start."""
    make = {"grpo": make_module, "ppo": make_ppo, "online_dpo": make_dpo}[algorithm]
    credit = {
        "grpo": GroupAdvantage("grpo"),
        "ppo": GAEAdvantage(1.0, 0.95),
        "online_dpo": PairAdvantage(),
    }
    needed = ROLES if algorithm == "ppo" else ("policy", "reference")
    roles = shift(make_roles(layout, needed, checkpoints_layers=checkpoints), std=0.1)
    module = make(roles, replays=ARMS[arm].replays)
    module.loss_terms = [DISTILLATION.loss_terms] if distils else []
    options = {"rollout": {"n_prompts": 8}, "advantage": credit[algorithm]} | options
    data = make_datamodule(roles, ARMS[arm], learner_parts=module.learner_parts, **options)
    return Run(module, data, data.collect())


def measured(diagnostic: Diagnostic, run: Run, experience: Experience | None = None) -> dict[str, float]:
    diagnostic.on_fit_start(None, run.module)
    diagnostic.on_update_start(experience or run.experience, run.data.splitter.parts)
    metrics: dict[str, float] = {}
    diagnostic.on_iteration_end(1, 1, metrics)
    assert metrics.pop(f"time/diagnostics/{diagnostic.name}") > 0
    return metrics


def trained_square(run: Run) -> float:
    """Return ‖gradient‖² of one optimizer step on the whole rollout, from the policy's `.grad`."""
    run.module.zero_grad()
    for batch in run.data.splitter.minibatches(run.experience):
        if "policy" in batch.learners:
            _, losses, _ = run.module.policy_terms(batch)
            torch.stack(list(losses.values())).sum().backward()
    found = [p.grad for p in run.module.roles.trained_parameters("policy") if p.grad is not None]
    square = sum(float(gradient.square().sum()) for gradient in found)
    run.module.zero_grad()
    return square


def square_of(found: dict[str, float], term: str = "loss") -> float:
    return found[f"gradient/{term}/signal"] + found[f"gradient/{term}/variance"]
