"""Statistics of log ρ by position in the response, in bins of neighbouring positions."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.diagnostics.importance_ratios import effective_share
from lit_rlkv.objectives.reduction import response_first

MAX_BINS = 64
"""Most bins; longer responses have bins of several neighbouring positions."""

FIRST_TAIL, TAIL_FACTOR = 8, 4
"""Positions 0 to 7 are the first bin of `overlap_tails`; the others end at 4 times their start."""

Arrays = dict[str, Tensor]


def bin_starts(response_mask: Bool[Tensor, "batch seq"]) -> Int[Tensor, " bin"]:
    """Return the first position of each bin; the first response token has position 0."""
    n_positions = int(response_mask.sum(dim=1).max())
    return torch.arange(0, n_positions, _width(n_positions))


def by_position(
    values: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "bin entry"]:
    """Return the values at the response tokens of each bin, NaN elsewhere.

    A position counts the response tokens before it, and no tokens that were given between them.
    """
    n_positions = int(response_mask.sum(dim=1).max())
    order = response_first(response_mask)[:, :n_positions]
    found = values.expand_as(response_mask).gather(1, order)
    found = found.masked_fill(~response_mask.gather(1, order), torch.nan)
    width = _width(n_positions)
    found = F.pad(found, (0, -n_positions % width), value=torch.nan)
    return found.reshape(len(found), -1, width).transpose(0, 1).flatten(1)


def log_ratios_by_position(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Arrays:
    """Return k1 and k3 estimates of KL(sampler ‖ learner) and the tail of |log ρ| in nats, by position.

    `position` is the first position of a bin, `n_response_tokens` its number of tokens.
    """
    log_ratio = log_ratio.masked_fill(~response_mask, 0.0)
    size = by_position(log_ratio.abs(), response_mask)
    return {
        "position": bin_starts(response_mask),
        "n_response_tokens": (~size.isnan()).sum(dim=1),
        "k1": by_position(-log_ratio, response_mask).nanmean(dim=1),
        "k3": by_position(log_ratio.expm1() - log_ratio, response_mask).nanmean(dim=1),
        "abs_log_ratio_p95": size.nanquantile(0.95, dim=1),
        "abs_log_ratio_p99": size.nanquantile(0.99, dim=1),
    }


def prefixes_by_position(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Arrays:
    """Return statistics of Π ρ over each response so far, the weight of unbiased reweighting.

    They are mean and 95th percentile of |log Π ρ| in nats, and the effective sample size (Σ w)² / (n Σ w²) of
    the weights w = Π ρ, from 1/n to 1. Responses that have ended keep their last value.
    """
    order = response_first(response_mask)
    so_far = log_ratio.masked_fill(~response_mask, 0.0).gather(1, order).cumsum(dim=1)
    is_shown = response_mask.gather(1, order).any(dim=0).expand_as(response_mask)
    size = by_position(so_far.abs(), is_shown)
    share = effective_share(so_far.T)[None]
    return {
        "prefix_abs_log_ratio": size.nanmean(dim=1),
        "prefix_abs_log_ratio_p95": size.nanquantile(0.95, dim=1),
        "prefix_ess": by_position(share, is_shown[:1]).nanmean(dim=1),
    }


def overlaps_by_position(
    overlap: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Arrays:
    """Return mean and 5th percentile of Σ_v min(μ_v, π_v) by position; NaN marks unmeasured responses."""
    found = by_position(overlap, response_mask)
    return {"overlap_mean": found.nanmean(dim=1), "overlap_p05": found.nanquantile(0.05, dim=1)}


def overlap_tails(
    overlap: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> dict[int, Tensor]:
    """Return the 5th percentile of the overlap in bins that are the same for responses of all lengths.

    The bins begin at positions 0, 8, 32, 128, 512, ..., which are the keys; those without a measured token
    are left out. NaN marks unmeasured responses.
    """
    order = response_first(response_mask)
    is_token, by_rank = response_mask.gather(1, order), overlap.expand_as(response_mask).gather(1, order)
    n_positions = int(response_mask.sum(dim=1).max())
    found, starts = {}, [0, FIRST_TAIL]
    while starts[-2] < n_positions:
        places = slice(starts[-2], starts[-1])
        values = by_rank[:, places][is_token[:, places]]
        if not values.isnan().all():
            found[starts[-2]] = values.nanquantile(0.05)
        starts.append(TAIL_FACTOR * starts[-1])
    return found


def as_lists(arrays: Arrays) -> dict[str, list[float | int | None]]:
    """Return plain numbers for JSON, None in place of NaN."""
    return {
        name: [None if value != value else value for value in values.tolist()]
        for name, values in arrays.items()
    }


def _width(n_positions: int) -> int:
    """Positions in a bin."""
    return max(-(-n_positions // MAX_BINS), 1)
