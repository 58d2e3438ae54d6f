"""Clipped losses of PPO, GRPO, GSPO and CISPO, per token: the policy's and the critic's."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    """Objective to maximize at each response token, and masks of the clipped tokens."""

    gain: Float[Tensor, "batch seq"]
    is_clipped_low: Bool[Tensor, "batch seq"]
    is_clipped_high: Bool[Tensor, "batch seq"]
    is_clipped_delta: Bool[Tensor, "batch seq"]
    """Tokens of negative advantage with a ratio above `delta`."""


def token_log_ratio(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """Return log π − log π_old of each token, as it is given."""
    return log_ratio


def sequence_log_ratio(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """Return at each token the mean log-ratio of its response, (log π(y) − log π_old(y)) / |y| (GSPO).

    The gradient at a token is that of its own log π, as in GSPO-token (arXiv:2507.18071): the sum over a
    response has the gradient of the mean if its tokens have equal weights and advantages.
    """
    n_tokens = response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = log_ratio.detach().masked_fill(~response_mask, 0.0).sum(dim=1, keepdim=True) / n_tokens
    return mean + (log_ratio - log_ratio.detach())


LOG_RATIOS = {"token": token_log_ratio, "sequence": sequence_log_ratio}
"""Log-ratios of policy and old policy, by TRL's `importance_sampling_level`."""


def clipped_surrogate(
    log_ratio: Float[Tensor, "batch seq"],
    advantages: Float[Tensor, "batch seq"],
    clip_low: float,
    clip_high: float,
    delta: float | None = None,
) -> Surrogate:
    """Return min(min(ratio, delta)·A, clip(ratio, 1 − clip_low, 1 + clip_high)·A) (arXiv:1707.06347).

    Args:
        log_ratio: log π − log π_old, one of `LOG_RATIOS`.
        delta: upper bound of the ratio where A is negative (arXiv:1912.09729, arXiv:2505.07291); above
            1 + clip_high. None: no bound.
    """
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    limit = torch.inf if delta is None else delta
    return Surrogate(
        gain=torch.minimum(ratio.clamp(max=limit) * advantages, bounded * advantages),
        is_clipped_low=(ratio < 1 - clip_low) & (advantages < 0),
        is_clipped_high=(ratio > 1 + clip_high) & (advantages > 0),
        is_clipped_delta=(ratio > limit) & (advantages < 0),
    )


def clipped_weight(
    log_ratio: Float[Tensor, "batch seq"],
    logps: Float[Tensor, "batch seq"],
    advantages: Float[Tensor, "batch seq"],
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Return sg(clip(ratio, 1 − clip_low, 1 + clip_high))·A·log π: CISPO (arXiv:2506.13585).

    A clipped token keeps its gradient, with a bounded weight. Tokens count as clipped under the same signs of
    the advantage as in `clipped_surrogate`, as in TRL's `cispo_clip_ratio`.
    """
    log_ratio = log_ratio.detach()
    weight = log_ratio.exp().clamp(1 - clip_low, 1 + clip_high)
    of_ppo = clipped_surrogate(log_ratio, advantages, clip_low, clip_high)
    return replace(of_ppo, gain=weight * advantages * logps)


@dataclass(frozen=True)
class ValueLoss:
    """Loss at each response token, and a mask of the tokens where clipping stops the gradient."""

    loss: Float[Tensor, "batch seq"]
    is_clipped: Bool[Tensor, "batch seq"]


def clipped_value(
    values: Float[Tensor, "batch seq"],
    old_values: Float[Tensor, "batch seq"],
    returns: Float[Tensor, "batch seq"],
    clip: float | None,
) -> ValueLoss:
    """Return max((V − R)², (V_clip − R)²) / 2, V_clip = V clamped to V_old ± `clip`; None does not clip.

    The clip is from PPO2 in OpenAI Baselines; the PPO paper (arXiv:1707.06347) has none.
    """
    error = (values - returns).square()
    if clip is None:
        return ValueLoss(loss=error / 2, is_clipped=torch.zeros_like(error, dtype=torch.bool))
    # Clamp V itself, not V_old + clamp(V − V_old), so that V inside the bounds is exact.
    bounded_error = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return ValueLoss(loss=torch.maximum(error, bounded_error) / 2, is_clipped=bounded_error > error)
