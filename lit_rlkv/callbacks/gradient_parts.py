"""Gradients of the policy from parts of the rollout, before the update."""

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_rlkv.callbacks.diagnostic import Diagnostic
from lit_rlkv.diagnostics.covariance import BLOCKS, CountSketch, block_of, chosen
from lit_rlkv.distributed.ranks import over_ranks
from lit_rlkv.experience.batch import Experience
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.replay import response_hidden, response_logps_and_entropy
from lit_rlkv.modules.base import PolicyModule, StepOutputs
from lit_rlkv.types import TrainBatch

HALF_SCALE = 2.0**12
"""Loss scale that prevents underflow of float16 gradients, like the gradient scaler of training."""

Vectors = dict[str, Tensor]
"""A gradient: a vector for each block of parameters."""

Losses = dict[str, Tensor]
"""Scalars to take gradients of, by name."""


class GradientDiagnostic(Diagnostic):
    """Base class of diagnostics that compute gradients of parts of a rollout; `.grad` is not changed.

    Args:
        n_parts: number of parts of a rollout, at most its number of prompts.
        blocks: grouping of the parameters, one of `lit_rlkv.diagnostics.covariance.BLOCKS`.
        sketch: size of a sketch of each block, so that memory grows with the model by no more than one
            gradient; None keeps full gradients. The relative error of a block's variance is about
            √(2 / sketch).
        only: a regular expression; only parameters with matching names are measured. If they belong to the
            last layers, the backward pass stops there. None measures all parameters that the policy trains.
    """

    def __init__(
        self,
        every: int,
        n_parts: int = 8,
        blocks: str = "layer",
        sketch: int | None = None,
        only: str | None = None,
    ) -> None:
        super().__init__(every)
        where = f"diagnostics.{self.name}"
        if not isinstance(n_parts, int) or n_parts < 2:
            raise ValueError(f"{where}.n_parts must be an integer of at least 2, got {n_parts}")
        if blocks not in BLOCKS:
            raise ValueError(f"{where}.blocks={blocks!r} is unknown; choose one of {', '.join(BLOCKS)}")
        if only is not None:
            try:
                re.compile(only)
            except re.error as error:
                raise ValueError(
                    f"{where}.only must be a regular expression, got {only!r} ({error}); correct it"
                ) from error
        self.n_parts = n_parts
        self.blocks = blocks
        self.sketch = None if sketch is None else CountSketch(sketch)
        self.only = only
        self.parameters: dict[str, nn.Parameter] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        policy_ids = {id(parameter) for parameter in self.policy.roles.trained_parameters("policy")}
        named = {name: p for name, p in self.policy.named_parameters() if id(p) in policy_ids}
        self.parameters = {name: named[name] for name in chosen(list(named), self.only)}

    def n_parts_of(self, experience: Experience) -> int:
        """Return the number of parts of a rollout."""
        return min(self.n_parts, len(experience.problems) // experience.group_size)

    def has_parts(self, experience: Experience) -> bool:
        """True if there are at least two parts, counted over all processes."""
        n_parts = torch.tensor(self.n_parts_of(experience), device=experience.has_eos.device)
        return bool(over_ranks(n_parts) > 1)

    def gradients(
        self, forward: Callable[[], tuple[StepOutputs, Losses]]
    ) -> tuple[StepOutputs, dict[str, Vectors]]:
        """Return the outputs of one forward, and the gradient of each of its losses.

        The graph of checkpointed layers supports one backward pass, so with checkpointing the forward is
        repeated for each loss.
        """
        repeats = self.policy.roles.checkpoints_layers
        outputs, losses = forward()
        found: dict[str, Vectors] = {}
        for name in list(losses):
            is_last = len(found) == len(losses) - 1
            found[name] = self.gradient(losses[name], keeps_graph=not (is_last or repeats))
            if repeats and not is_last:
                del outputs, losses  # frees the graph before the next forward
                outputs, losses = forward()
        return outputs, found

    def gradient(self, loss: Tensor, *, keeps_graph: bool) -> Vectors:
        """Return the gradient of a loss with respect to the parameters, in float32 or better."""
        # As in training: the forward pass under autocast, the backward pass outside.
        scale = HALF_SCALE if is_half_autocast(loss.device) else 1.0
        with torch.autocast(loss.device.type, enabled=False):
            found = torch.autograd.grad(
                loss * scale, list(self.parameters.values()), retain_graph=keeps_graph, allow_unused=True
            )
        pieces: dict[str, list[Tensor]] = defaultdict(list)
        for (name, parameter), gradient in zip(self.parameters.items(), found, strict=True):
            flat = (torch.zeros_like(parameter) if gradient is None else gradient).detach().flatten()
            flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
            flat = flat if scale == 1.0 else flat / scale
            pieces[block_of(name, self.blocks)].append(
                flat if self.sketch is None else self.sketch(name, flat)
            )
        if self.sketch is None:
            return {block: torch.cat(vectors) for block, vectors in pieces.items()}
        return {block: torch.stack(vectors).sum(dim=0) for block, vectors in pieces.items()}


def algorithm_loss(module: PolicyModule, batch: TrainBatch, outputs: StepOutputs) -> Tensor:
    """Return the algorithm's own objective, without KL and callbacks' terms."""
    objective, _ = module.objective(batch, outputs)
    return module.policy_weight * torch.stack(list(objective.values())).sum()


def policy_outputs(module: PolicyModule, batch: TrainBatch, *, shadow: bool) -> StepOutputs:
    """Run one forward of the policy, under the shadow mask or dense."""
    # Cached autocast weights may come from a forward without gradients.
    torch.clear_autocast_cache()
    with acting_as(module.roles, "policy") as backbone:
        hidden = response_hidden(backbone, batch.rollout, shadow=shadow)
        found = response_logps_and_entropy(backbone, batch.rollout, hidden, module.temperature)
        return StepOutputs(hidden, *found)


def added(gradient: Vectors, more: Vectors) -> Vectors:
    """Return the sum of two gradients; the first may be empty."""
    return {block: gradient[block] + vector if gradient else vector for block, vector in more.items()}


def is_half_autocast(device: torch.device) -> bool:
    """True if autocast to float16 is on."""
    is_on = torch.is_autocast_enabled(device.type)
    return is_on and torch.get_autocast_dtype(device.type) == torch.float16
