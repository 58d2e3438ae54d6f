"""Callback that mixes the policy's weights into the reference at an interval of iterations."""

from typing import Any

import torch

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.checks import Number
from lit_rlkv.distributed.ranks import FORWARD_COORDINATOR
from lit_rlkv.models.hydra import Roles


class ReferenceSync(RLCallback):
    """Sets reference = alpha · policy + (1 − alpha) · reference after every `every` iterations.

    It is TRL's `SyncRefModelCallback`, which counts optimizer steps (arXiv:2404.09656). Policy and reference
    must have whole backbones of their own.
    """

    roles: Roles
    """Roles of the module in training, set by `on_fit_start`."""

    def __init__(self, every: int, alpha: Number) -> None:
        self.every = every
        self.alpha = alpha

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.roles = pl_module.roles

    @torch.no_grad()
    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        if iteration % self.every != 0:
            return
        FORWARD_COORDINATOR.wait()  # writes to a gathered layer would be lost
        reference, policy = (self.roles.backbone(role) for role in ("reference", "policy"))
        for name, target in reference.named_parameters():  # the policy may have a kv_scorer beside them
            target.mul_(1.0 - self.alpha).add_(policy.get_parameter(name), alpha=self.alpha)
        self.roles.reference_is_synced = True
