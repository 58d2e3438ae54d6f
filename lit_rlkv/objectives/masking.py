"""Masked reductions: what lies outside a mask never matters, not even NaN."""

from jaxtyping import Bool, Float
from torch import Tensor


def masked_sum(values: Float[Tensor, "*shape"], is_counted: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Sum over the counted entries."""
    return values.masked_fill(~is_counted, 0.0).sum()


def masked_mean(values: Float[Tensor, "*shape"], is_counted: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Mean over the counted entries; 0 where there are none."""
    return masked_sum(values, is_counted) / is_counted.sum().clamp(min=1)


def weighted_sum(values: Float[Tensor, "*shape"], weight: Float[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Σ weight·value over the entries of non-zero weight."""
    return (values.masked_fill(weight == 0, 0.0) * weight).sum()
