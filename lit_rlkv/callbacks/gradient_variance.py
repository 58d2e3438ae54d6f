"""Gradients of the policy from parts of the rollout before the update, and their variance."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from lit_rlkv.callbacks.diagnostic import Diagnostic
from lit_rlkv.checks import Range
from lit_rlkv.diagnostics.covariance import (
    Blocks,
    CountSketch,
    PartGradients,
    block_of,
    proxy_sums,
    squared_probs,
    variance_proxy,
)
from lit_rlkv.distributed.ranks import over_ranks
from lit_rlkv.experience.advantages import PairAdvantage
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.minibatches import RolloutPart, RolloutSplit
from lit_rlkv.models.backbone import head_logits, text_config
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.replay import (
    response_hidden,
    response_logps_and_entropy,
    response_sets,
    scatter_to_response,
)
from lit_rlkv.modules.base import PolicyModule, StepOutputs
from lit_rlkv.settings import PositiveInt, Text, dataclass
from lit_rlkv.types import TrainBatch

HALF_SCALE = 2.0**12
"""Loss scale that prevents underflow of float16 gradients, like the gradient scaler of training."""

Vectors = dict[str, Tensor]
"""A gradient: a vector for each block of parameters."""

Losses = dict[str, Tensor]
"""Scalars to take gradients of, by name."""


@dataclass(eq=False)
class GradientDiagnostic(Diagnostic):
    """Base class of diagnostics that compute gradients of parts of a rollout; `.grad` is not changed."""

    n_parts: Annotated[int, Range(least=2)] = 8
    """parts of a rollout, at most its number of prompts"""
    blocks: Blocks = "layer"
    """grouping of the parameters"""
    sketch: PositiveInt | None = None
    """size of a sketch of each block, so that memory grows with the model by no more than one gradient;
    the relative error of a block's variance is about √(2 / sketch); null: full gradients"""
    only: Text | None = None
    """a regular expression: only parameters with matching names are measured; if they belong to the last
    layers, the backward pass stops there; null: all parameters that the policy trains"""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.only or "")
        except re.error as error:
            raise ValueError(
                f"only must be a regular expression, got {self.only!r} ({error}); correct it"
            ) from error
        self._sketched = None if self.sketch is None else CountSketch(self.sketch)
        self.parameters: dict[str, nn.Parameter] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        policy_ids = {id(parameter) for parameter in self.policy.roles.trained_parameters("policy")}
        named = {name: p for name, p in self.policy.named_parameters() if id(p) in policy_ids}
        self.parameters = {name: p for name, p in named.items() if re.search(self.only or "", name)}
        if not self.parameters:
            raise ValueError(
                f"only must match a parameter that the policy trains, such as {next(iter(named))}, got "
                f"{self.only!r}; give another regular expression, or null for all"
            )

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
        device = loss.device.type
        is_half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
        scale = HALF_SCALE if is_half else 1.0
        with torch.autocast(device, enabled=False):
            found = torch.autograd.grad(
                loss * scale, list(self.parameters.values()), retain_graph=keeps_graph, allow_unused=True
            )
        pieces: dict[str, list[Tensor]] = defaultdict(list)
        for (name, parameter), gradient in zip(self.parameters.items(), found, strict=True):
            flat = (torch.zeros_like(parameter) if gradient is None else gradient).detach().flatten()
            flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
            flat = flat if scale == 1.0 else flat / scale
            pieces[block_of(name, self.blocks)].append(
                flat if self._sketched is None else self._sketched(name, flat)
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


Term = Literal["policy", "loss"]


@dataclass(eq=False)
class GradientVariance(GradientDiagnostic):
    """Variance, signal-to-noise ratio and noise scale of the policy's gradient, and verl's variance proxies.

    Each part of the rollout estimates the same gradient from other prompts, so the spread of the parts gives
    the variance between rollouts, for the policy before its first update. See
    `lit_rlkv.diagnostics.covariance`. The critic's loss is left out, also if it trains the same adapter.
    During critic warmup this is the gradient that the policy would get.
    """

    name = "gradient"
    terms: tuple[Term, ...] = ("policy", "loss")
    """losses to measure: the algorithm's objective, and the policy's loss with KL and callbacks' terms"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.terms:
            raise ValueError("terms must name policy, loss or both, got none; give [policy,loss]")

    def measure_updates(self, experience: Experience, split: RolloutSplit) -> None:
        if not self.has_parts(experience):
            return
        found: dict[str, PartGradients] = {term: PartGradients() for term in self.terms}
        sums = torch.zeros(4, device=experience.rollout.input_ids.device)
        for part in split(experience, self.n_parts_of(experience)):
            gradients: dict[str, Vectors] = {term: {} for term in self.terms}
            for batch in part.batches:
                more, batch_sums = self.gradients_of_batch(batch)
                gradients = {term: added(gradients[term], more[term]) for term in self.terms}
                sums = sums + batch_sums
            for term in self.terms:
                found[term].add(gradients[term], *self.size_of_part(part, term))
        torch.clear_autocast_cache()
        self._report(found, sums)

    def size_of_part(self, part: RolloutPart, term: str) -> tuple[int, float]:
        """Return the number of prompts of the part that count in this term, and its share of the denominator.

        Loss terms of callbacks are averaged over all response tokens, including tokens that the algorithm
        drops. A loss with both has two denominators and is treated as a mean over tokens: the gradient of a
        KL is mostly signal, which a wrong share would count as noise; that of rewards is mostly noise.
        """
        if term == "loss" and self.policy.loss_terms:
            return part.n_prompts, part.token_share
        return part.n_groups, part.share

    def gradients_of_batch(self, batch: TrainBatch) -> tuple[dict[str, Vectors], Tensor]:
        """Return the gradient of each term from one micro-batch, and its sums for the proxies."""
        module = self.policy
        outputs, found = self.gradients(partial(self._forward, batch))
        by_term: dict[str, Vectors] = {term: found[term if term in found else "loss"] for term in self.terms}
        with torch.no_grad(), acting_as(module.roles, "policy") as backbone:
            head, size = partial(head_logits, backbone), text_config(backbone).vocab_size
            sets = response_sets(batch.rollout)
            squares = squared_probs(outputs.hidden, head, module.temperature, size, sets)
            sums = proxy_sums(
                outputs.logps,
                scatter_to_response(batch.rollout, squares),
                batch.advantages,
                batch.correction,
                batch.loss_weight != 0,
            )
        return by_term, sums

    def _report(self, found: Mapping[str, PartGradients], sums: Tensor) -> None:
        square = None
        for term, parts in found.items():
            spread = parts.spread()
            if spread is None:
                continue
            self.scalars |= spread.scalars(f"gradient/{term}")
            self.arrays["blocks"] = list(spread.blocks)
            self.arrays[term] = {
                "n_prompts": spread.n_prompts,
                "variance": spread.variance.tolist(),
                "signal": spread.signal.tolist(),
            }
            if term == "policy" and self.only is None:
                square = float(spread.square.sum())
        if not issubclass(self.policy.advantage_estimator, PairAdvantage):
            self.scalars |= variance_proxy(sums, square)

    def _forward(self, batch: TrainBatch) -> tuple[StepOutputs, Losses]:
        """Return the losses to differentiate; only one if there are no terms beside the objective."""
        module = self.policy
        if self.terms == ("policy",):
            outputs = policy_outputs(module, batch, shadow=module.replays)
            return outputs, {"policy": algorithm_loss(module, batch, outputs)}
        torch.clear_autocast_cache()
        outputs, losses, _ = module.policy_terms(batch)
        total = {"loss": torch.stack(list(losses.values())).sum()}
        if self.terms == ("loss",) or losses.keys() == module.objective(batch, outputs)[0].keys():
            return outputs, total
        return outputs, {"policy": algorithm_loss(module, batch, outputs)} | total
