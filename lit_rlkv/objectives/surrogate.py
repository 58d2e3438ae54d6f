"""The clipped surrogate of PPO and GRPO, token by token."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    """The gain to maximise at each response token, and where it is clipped."""

    gain: Float[Tensor, "batch seq"]
    is_clipped_low: Bool[Tensor, "batch seq"]
    is_clipped_high: Bool[Tensor, "batch seq"]


def clipped(
    logps: Float[Tensor, "batch seq"],
    old_logps: Float[Tensor, "batch seq"],
    advantages: Float[Tensor, "batch seq"],
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """min(ratio·A, clip(ratio, 1 − clip_low, 1 + clip_high)·A), ratio = π/π_old (arXiv:1707.06347)."""
    ratio = (logps - old_logps).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(
        gain=torch.minimum(ratio * advantages, bounded * advantages),
        is_clipped_low=(ratio < 1 - clip_low) & (advantages < 0),
        is_clipped_high=(ratio > 1 + clip_high) & (advantages > 0),
    )
