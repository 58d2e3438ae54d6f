"""Corrections for the mismatch of sampler and learner: replay and importance weights.

A weight function takes log ρ_t = log π_old − log μ of the response tokens, where π_old is under the learner's
view. It returns the weight of each token and a mask of the tokens that denominators count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.checks import Range
from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.objectives.reduction import masked_mean
from lit_rlkv.types import TensorBatch


@dataclass(frozen=True)
class ISWeights(TensorBatch):
    """Detached weight of each token, and a mask of the tokens that denominators count."""

    weight: Float[Tensor, "batch seq"]
    is_counted: Bool[Tensor, "batch seq"]


WeightFn = Callable[[Tensor, Tensor], ISWeights]


@dataclass(frozen=True)
class Correction:
    """One training method: cache of the sampler, view of the learner, and importance weights."""

    samples_dense: bool
    """True if rollouts evict no keys."""
    replays: bool
    """True if the learner replays the evictions of the rollout."""
    weight_fn: WeightFn
    bypass_mode: bool = False
    """True if the sampler's log-probs are π_old, so that every weight is 1; False if π_old is scored under
    the learner's view before the update. Name and default are verl's (`rollout_correction.bypass_mode`)."""


def global_is_weights(
    weight_fn: WeightFn,
    log_ratio: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
    ranks: Ranks,
) -> ISWeights:
    """Return the weights of this rank's tokens; normalisation is over the tokens of all ranks."""
    found = weight_fn(ranks.all_gather(log_ratio), ranks.all_gather(response_mask))
    mine = ranks.local_rows(len(log_ratio))
    return ISWeights(found.weight[mine], found.is_counted[mine])


def unweighted(log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]) -> ISWeights:
    """Return weight 1: correct for dense rollouts and for replay, biased for a dense learner."""
    return ISWeights(torch.ones_like(log_ratio), response_mask)


def truncated(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"], cap: float = 2.0
) -> ISWeights:
    """Return min(ρ_t, cap): truncated importance sampling (TIS)."""
    _check_bounds(cap=cap)
    return ISWeights(_ratio(log_ratio, response_mask).clamp(max=cap), response_mask)


def masked(
    log_ratio: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
    low: float = 0.5,
    high: float = 2.0,
) -> ISWeights:
    """Return ρ_t inside [low, high] and 0 outside (MIS, IcePop); tokens of weight 0 count in denominators."""
    _check_bounds(low=low, high=high)
    ratio = _ratio(log_ratio, response_mask)
    return ISWeights(torch.where((ratio >= low) & (ratio <= high), ratio, 0.0), response_mask)


def sequence_truncated(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"], cap: float = 2.0
) -> ISWeights:
    """Return min(Π_t ρ_t, cap) at each token of a response: truncated importance sampling per sequence."""
    return truncated(_sequence_log_ratio(log_ratio, response_mask), response_mask, cap)


def sequence_masked(
    log_ratio: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
    low: float = 0.5,
    high: float = 2.0,
) -> ISWeights:
    """Return Π_t ρ_t at each token if it is inside [low, high], else 0; all tokens count in denominators."""
    return masked(_sequence_log_ratio(log_ratio, response_mask), response_mask, low, high)


def sparse_rl(
    log_ratio: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
    veto: float = 1e-4,
    low: float = 0.5,
    high: float = 1.5,
) -> ISWeights:
    """Return the weights of Sparse-RL as released (arXiv:2601.10079).

    A sequence with any ρ_t < veto is dropped, and so are tokens outside [low, high]. The other tokens weigh
    min(ρ_t, high), normalized to mean 1, and only they count in denominators.
    """
    _check_bounds(veto=veto, low=low, high=high)
    ratio = _ratio(log_ratio, response_mask)
    has_veto = (ratio < veto).any(dim=1, keepdim=True)
    is_counted = response_mask & ~has_veto & (ratio >= low) & (ratio <= high)
    weight = ratio.clamp(max=high)
    # Every counted weight is at least `low`; the clamp matters only if no token counts.
    weight = weight / masked_mean(weight, is_counted).clamp(min=low)
    return ISWeights(torch.where(is_counted, weight, 0.0), is_counted)


CorrectionName = Literal["tis", "mis", "sparse_rl"]
CORRECTIONS: dict[CorrectionName, WeightFn] = {"tis": truncated, "mis": masked, "sparse_rl": sparse_rl}
"""Weight functions by name, with default options."""


def _sequence_log_ratio(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """Return log Π_t ρ_t of each response at all its columns."""
    return log_ratio.masked_fill(~response_mask, 0.0).sum(dim=1, keepdim=True).expand_as(log_ratio)


def _check_bounds(**bounds: float) -> None:
    """Raise a ValueError unless the bounds of a ratio are finite: no ratio is above or below NaN."""
    for name, bound in bounds.items():
        Range(least=0).check(name, bound)


def _ratio(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """Return ρ_t of the response tokens, and 1 elsewhere."""
    return log_ratio.masked_fill(~response_mask, 0.0).exp()
