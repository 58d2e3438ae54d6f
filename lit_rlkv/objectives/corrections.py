"""Arms of the comparison: what the sampler keeps, what the learner sees, how the mismatch weighs.

A weight function takes log ρ_t = log π_old − log μ of the actions, π_old under the learner's view, and
answers how much each action weighs and which actions the denominators may count.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.objectives.masking import masked_mean


@dataclass(frozen=True)
class ISWeights:
    """Detached weight of each action, and the actions that count."""

    weight: Float[Tensor, "batch seq"]
    is_counted: Bool[Tensor, "batch seq"]


WeightFn = Callable[[Tensor, Tensor], ISWeights]


@dataclass(frozen=True)
class Correction:
    """One arm: dense or sparse on either side, and the weight that ties them."""

    samples_dense: bool
    """Rollouts keep every key."""
    replays: bool
    """The learner sees what the sampler saw, by its eviction table."""
    weigh: WeightFn


def global_is_weights(
    weigh: WeightFn,
    log_ratio: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
    ranks: Ranks,
) -> ISWeights:
    """Return the weights of this rank's tokens; normalisation is over the tokens of all ranks."""
    found = weigh(ranks.all_gather(log_ratio), ranks.all_gather(response_mask))
    mine = ranks.local_rows(len(log_ratio))
    return ISWeights(found.weight[mine], found.is_counted[mine])


def unweighted(log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]) -> ISWeights:
    """Weight 1: right for dense rollouts and for replay, and the naive mistake for a dense learner."""
    return ISWeights(torch.ones_like(log_ratio), response_mask)


def truncated(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"], cap: float = 2.0
) -> ISWeights:
    """TIS: min(ρ_t, C)."""
    return ISWeights(_ratio(log_ratio, response_mask).clamp(max=cap), response_mask)


def masked(
    log_ratio: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
    low: float = 0.5,
    high: float = 2.0,
) -> ISWeights:
    """MIS (IcePop): ρ_t inside [low, high], else 0; a zeroed token still counts in the denominators."""
    ratio = _ratio(log_ratio, response_mask)
    return ISWeights(torch.where((ratio >= low) & (ratio <= high), ratio, 0.0), response_mask)


def sparse_rl(
    log_ratio: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
    veto: float = 1e-4,
    low: float = 0.5,
    high: float = 1.5,
) -> ISWeights:
    """Sparse-RL as released (arXiv:2601.10079): tokens and sequences far from the sampler are dropped.

    A sequence with any ρ_t < veto is dropped whole, tokens outside [low, high] are dropped, the rest weigh
    min(ρ_t, high) normalised to mean 1, and denominators count the rest only.
    """
    ratio = _ratio(log_ratio, response_mask)
    has_veto = (ratio < veto).any(dim=1, keepdim=True)
    is_counted = response_mask & ~has_veto & (ratio >= low) & (ratio <= high)
    weight = ratio.clamp(max=high)
    # Every counted weight is at least `low`, so where anything counts the mean is positive.
    weight = weight / masked_mean(weight, is_counted).clamp(min=low)
    return ISWeights(torch.where(is_counted, weight, 0.0), is_counted)


CORRECTIONS: dict[str, WeightFn] = {"tis": truncated, "mis": masked, "sparse_rl": sparse_rl}
"""Those that weigh, by the names of their arms, each with its default options."""


def _ratio(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """ρ_t, and 1 outside the actions whatever stands there."""
    return log_ratio.masked_fill(~response_mask, 0.0).exp()
