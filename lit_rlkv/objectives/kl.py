"""Estimators of KL(π ‖ reference) from log-probs of tokens that π sampled (Schulman, 'Approximating KL')."""

from jaxtyping import Float
from torch import Tensor


def k1(logps: Float[Tensor, "*shape"], ref_logps: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """log π − log ref: unbiased, noisy, may be negative."""
    return logps - ref_logps


def k2(logps: Float[Tensor, "*shape"], ref_logps: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """(log π − log ref)² / 2: biased, and its gradient is that of the KL."""
    return (logps - ref_logps).square() / 2


def k3(logps: Float[Tensor, "*shape"], ref_logps: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """ref/π − 1 − log(ref/π): unbiased and never negative; what GRPO uses."""
    log_ratio = ref_logps - logps
    return log_ratio.expm1() - log_ratio


LOSSES = {"k2": k2, "k3": k3}
"""The estimators that may stand in a loss; the gradient of k1 is 0 in expectation."""
