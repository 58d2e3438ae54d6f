"""The loss of a value function, action by action."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class ValueLoss:
    """The loss to minimise at each response token, and where clipping stops its gradient."""

    loss: Float[Tensor, "batch seq"]
    is_clipped: Bool[Tensor, "batch seq"]


def clipped_value(
    values: Float[Tensor, "batch seq"],
    old_values: Float[Tensor, "batch seq"],
    returns: Float[Tensor, "batch seq"],
    clip: float | None,
) -> ValueLoss:
    """max((V − R)², (V_clip − R)²) / 2, V_clip = V kept within `clip` of V_old; None clips nothing.

    The clip is that of PPO2 in OpenAI Baselines; PPO's paper (arXiv:1707.06347) has none.
    """
    error = (values - returns).square()
    if clip is None:
        return ValueLoss(loss=error / 2, is_clipped=torch.zeros_like(error, dtype=torch.bool))
    # A clamp of V itself, not V_old + clamp(V − V_old): inside the bounds it is V to the last bit.
    bounded_error = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return ValueLoss(loss=torch.maximum(error, bounded_error) / 2, is_clipped=bounded_error > error)
