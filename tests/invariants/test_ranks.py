"""Two processes that share a batch give the gradients of one."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_rlkv.experience.advantages import GAEAdvantage
from lit_rlkv.modules.ppo import PPO
from tests.hand_built import make_datamodule, make_optimizer, make_roles, shift

ALL = ("policy", "reference", "reward", "value")


def make_run(layout: str, *, separate: bool, checkpoints: bool) -> tuple[PPO, list]:
    """A critic and a policy, and one optimizer step in its micro-batches, alike in every process."""
    roles = shift(make_roles(layout, needed=ALL, checkpoints_layers=checkpoints))
    module = PPO(
        roles, make_optimizer, replays=True, temperature=1.0, clip_low=0.2, clip_high=0.2, value_clip=0.2,
        value_weight=0.5, value_shadow=False, separate_passes=separate,
    )  # fmt: skip
    data = make_datamodule(roles, advantage=GAEAdvantage(1.0, 0.95), learner_parts=module.learner_parts)
    return module, list(data.splitter.minibatches(data.collect()))


def gradients(module: PPO) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def on_a_rank(fabric: Fabric, make: Callable[[], tuple[PPO, list]]) -> dict[str, np.ndarray]:
    """This rank's half of each micro-batch, then the gradients that DDP averaged, times the ranks."""
    module, batches = make()
    model, _ = fabric.setup(module, module.configure_optimizers()["optimizer"])
    for batch in batches:
        mine = torch.arange(len(batch.advantages)).tensor_split(fabric.world_size)[fabric.global_rank]
        with fabric.no_backward_sync(model, enabled=not batch.ends_step):
            fabric.backward(model.training_step(batch.rows(mine), 0)["loss"])
    # As arrays: a tensor would go back to the first process by a file that ends with this one.
    return {name: (g * fabric.world_size).numpy() for name, g in gradients(module).items()}


@pytest.mark.parametrize(
    ("layout", "separate", "checkpoints"),
    [("hydra", True, False), ("hydra", False, True), ("j_hydra", True, True), ("dynamic_lora", True, False)],
)
def test_two_ranks_equal_one(layout: str, separate: bool, checkpoints: bool):
    def make():
        return make_run(layout, separate=separate, checkpoints=checkpoints)

    module, batches = make()
    for batch in batches:
        module.training_step(batch, 0)["loss"].backward()
    expected = gradients(module)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork")
    found = fabric.launch(on_a_rank, make)
    assert found.keys() == expected.keys()
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), gradient, rtol=1e-4, atol=1e-6)
