"""Clipped losses of PPO and GRPO, per token: the policy's surrogate and the critic's value loss."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    """Objective to maximize at each response token, and masks of the clipped tokens."""

    gain: Float[Tensor, "batch seq"]
    is_clipped_low: Bool[Tensor, "batch seq"]
    is_clipped_high: Bool[Tensor, "batch seq"]


def clipped_surrogate(
    logps: Float[Tensor, "batch seq"],
    old_logps: Float[Tensor, "batch seq"],
    advantages: Float[Tensor, "batch seq"],
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Return min(ratio·A, clip(ratio, 1 − clip_low, 1 + clip_high)·A), ratio = π/π_old (arXiv:1707.06347)."""
    ratio = (logps - old_logps).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(
        gain=torch.minimum(ratio * advantages, bounded * advantages),
        is_clipped_low=(ratio < 1 - clip_low) & (advantages < 0),
        is_clipped_high=(ratio > 1 + clip_high) & (advantages > 0),
    )


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
