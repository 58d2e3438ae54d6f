"""What each off-policy correction would make of one rollout: effective sample size, weights, rejections."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.diagnostics.mismatch import MAX_LOG_RATIO
from lit_rlkv.diagnostics.scalars import Scalars
from lit_rlkv.objectives.corrections import CORRECTIONS, WeightFn
from lit_rlkv.objectives.masking import masked_mean

LogWeightFn = Callable[[Tensor, Tensor], Tensor]
"""From log ρ [batch, seq] and `response_mask` to the log of each action's weight; −inf is a weight of 0."""


def token_ratio(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """ρ_t itself, untruncated."""
    return log_ratio


def sequence_ratio(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """Π ρ_t of the response at each of its actions: the only unbiased one, untruncated."""
    return log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)


def _of(weigh: WeightFn) -> LogWeightFn:
    return lambda log_ratio, response_mask: weigh(log_ratio, response_mask).weight.log()


ARMS: dict[str, LogWeightFn] = {
    "token_ratio": token_ratio,
    "sequence_ratio": sequence_ratio,
    **{name: _of(weigh) for name, weigh in CORRECTIONS.items()},
}
"""The corrections with their default options. The naive arm is not among them: all its weights are 1."""

TRUNCATING, REJECTING = ("tis",), ("mis", "sparse_rl")


def arm_statistics(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Scalars:
    """`kv/arms/{arm}/*` from log ρ = log π_dense − log μ of the actions.

    ess = (Σ w)² / (n Σ w²) over all n actions, what is rejected with weight 0 among them; ess_seq the same
    over responses, each with the mean weight of its actions. mean_weight and max_weight are of actions.
    rejected is the share of actions with weight 0, clipped of those that weigh less than their ratio.
    Logs of weights are added up, so that no product of a long response leaves the range of floats; a weight
    is shown as at most e^20.
    """
    log_ratio = log_ratio.masked_fill(~response_mask, 0.0)
    scalars: Scalars = {}
    for name, log_weigh in ARMS.items():
        log_weight = log_weigh(log_ratio, response_mask).masked_fill(~response_mask, -torch.inf)
        found = _statistics(log_weight, response_mask)
        if name in TRUNCATING:
            is_clipped = log_weight < log_ratio - 1e-4  # the rounding of a weight's log is no clip
            found["clipped"] = masked_mean(is_clipped.float(), response_mask)
        if name in REJECTING:
            found["rejected"] = masked_mean((log_weight == -torch.inf).float(), response_mask)
        scalars |= {f"kv/arms/{name}/{statistic}": value for statistic, value in found.items()}
    return scalars


def _statistics(log_weight: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]) -> Scalars:
    n_response_tokens = response_mask.sum(dim=1)
    of_rows = log_weight.logsumexp(dim=1) - n_response_tokens.clamp(min=1).log()
    of_actions = log_weight[response_mask]
    mean = of_actions.logsumexp(dim=0) - math.log(max(len(of_actions), 1))
    return {
        "ess": effective_share(of_actions),
        "ess_seq": effective_share(of_rows[n_response_tokens > 0]),
        "mean_weight": mean.clamp(max=MAX_LOG_RATIO).exp(),
        "max_weight": log_weight.max().clamp(max=MAX_LOG_RATIO).exp(),
    }


def effective_share(log_weight: Float[Tensor, "*lead sample"]) -> Float[Tensor, "*lead"]:
    """Effective sample size (Σ w)² / (n Σ w²) of n weights, from their logs: 1/n to 1; 0 where all are 0."""
    # The largest weight as the unit: only ratios matter, and sums of logs far from 0 would be rounded.
    log_weight = log_weight - log_weight.amax(dim=-1, keepdim=True)
    log_share = 2 * log_weight.logsumexp(dim=-1) - (2 * log_weight).logsumexp(dim=-1)
    return (log_share - math.log(log_weight.shape[-1])).exp().nan_to_num(nan=0.0)
