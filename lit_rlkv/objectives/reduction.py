"""Masked reductions of per-token values, and token weights for the aggregation of losses.

Values outside a mask never change a result, not even NaN. Denominators cover the whole optimizer step.
"""

from jaxtyping import Bool, Float
from torch import Tensor


def masked_sum(values: Float[Tensor, "*shape"], is_counted: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return the sum over the counted entries."""
    return values.masked_fill(~is_counted, 0.0).sum()


def masked_mean(values: Float[Tensor, "*shape"], is_counted: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return the mean over the counted entries; 0 if there are none."""
    return masked_sum(values, is_counted) / is_counted.sum().clamp(min=1)


def weighted_sum(values: Float[Tensor, "*shape"], weight: Float[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return Σ weight·value over the entries of non-zero weight."""
    return (values.masked_fill(weight == 0, 0.0) * weight).sum()


def token_mean(is_counted: Bool[Tensor, "batch seq"], max_new_tokens: int) -> Float[Tensor, "batch seq"]:
    """Return equal weights for all counted tokens of the step (DAPO, arXiv:2503.14476)."""
    return is_counted.float() / is_counted.sum().clamp(min=1)


def sequence_mean(is_counted: Bool[Tensor, "batch seq"], max_new_tokens: int) -> Float[Tensor, "batch seq"]:
    """Return equal weights for all responses, each split over its tokens (GRPO, arXiv:2402.03300)."""
    n_sequences = is_counted.any(dim=1).sum().clamp(min=1)
    return is_counted.float() / is_counted.sum(dim=1, keepdim=True).clamp(min=1) / n_sequences


def constant_length(is_counted: Bool[Tensor, "batch seq"], max_new_tokens: int) -> Float[Tensor, "batch seq"]:
    """Return weights 1 / (n_responses · max_new_tokens) (Dr. GRPO, arXiv:2503.20783)."""
    n_sequences = is_counted.any(dim=1).sum().clamp(min=1)
    return is_counted.float() / max_new_tokens / n_sequences


AGGREGATIONS = {"token": token_mean, "sequence": sequence_mean, "constant": constant_length}
