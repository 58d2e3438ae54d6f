"""Masked reductions of per-token values, and token weights for the aggregation of losses.

Values outside a mask never change a result, not even NaN. Denominators cover the whole optimizer step.
"""

from jaxtyping import Bool, Float, Int
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


def token_mean(
    is_counted: Bool[Tensor, "batch seq"], max_new_tokens: int, n_responses: Int[Tensor, ""] | None = None
) -> Float[Tensor, "batch seq"]:
    """Return equal weights for all counted tokens of the step (DAPO, arXiv:2503.14476)."""
    return is_counted.float() / is_counted.sum().clamp(min=1)


def sequence_mean(
    is_counted: Bool[Tensor, "batch seq"], max_new_tokens: int, n_responses: Int[Tensor, ""] | None = None
) -> Float[Tensor, "batch seq"]:
    """Return equal weights for all responses, each split over its tokens (GRPO, arXiv:2402.03300).

    Args:
        n_responses: divides the weights; None: the number of responses with a counted token.
    """
    n = is_counted.any(dim=1).sum() if n_responses is None else n_responses
    return is_counted.float() / is_counted.sum(dim=1, keepdim=True).clamp(min=1) / n.clamp(min=1)


def constant_length(
    is_counted: Bool[Tensor, "batch seq"], max_new_tokens: int, n_responses: Int[Tensor, ""] | None = None
) -> Float[Tensor, "batch seq"]:
    """Return weights 1 / (n_responses · max_new_tokens) (Dr. GRPO, arXiv:2503.20783); see `sequence_mean`."""
    n = is_counted.any(dim=1).sum() if n_responses is None else n_responses
    return is_counted.float() / max_new_tokens / n.clamp(min=1)


AGGREGATIONS = {"token": token_mean, "sequence": sequence_mean, "constant": constant_length}


def response_first(response_mask: Bool[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Return an order of each row's columns, in which the response tokens come first, in their order."""
    return (~response_mask).int().argsort(dim=1, stable=True)
