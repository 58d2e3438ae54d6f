"""Estimators of KL(π ‖ reference) from log-probs of tokens that π sampled (Schulman, 'Approximating KL')."""

from jaxtyping import Bool, Float
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


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
"""All of them: any may be measured, or stand in a reward, through which no gradient flows."""

LOSSES = {"k2": k2, "k3": k3}
"""The estimators that may stand in a loss; the gradient of k1 is 0 in expectation."""


def kl_penalty(
    estimator: str,
    old_logps: Float[Tensor, "batch seq"],
    ref_logps: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
    weight: float | int,
) -> Float[Tensor, "batch seq"]:
    """weight·KL of each action, which the reward pays for; `estimator` is one of `ESTIMATORS`."""
    return weight * ESTIMATORS[estimator](old_logps, ref_logps).masked_fill(~response_mask, 0.0)


MAX_ERROR = 0.2
"""Largest relative error of the KL that the weight answers to."""


def adapted_weight(
    weight: float | int, kl: float, n_samples: int, *, target: float | int, horizon: float | int
) -> float:
    """The KL weight for the next rollout: higher where the KL was above its target (arXiv:1909.08593).

    weight·(1 + error·n_samples / horizon), error = kl / target − 1 kept within ±0.2; as in the paper's code,
    n_samples / horizon takes the place of its constant gain.

    Args:
        weight: of this rollout.
        kl: measured on this rollout, in the unit of `target`: the paper's is nats per response.
        n_samples: responses in this rollout.
        target: the KL to hold.
        horizon: responses over which a lasting error is added to the weight once.

    Raises:
        ValueError: no positive target, or a horizon so short that the weight could change its sign.
    """
    if not target > 0:
        raise ValueError(f"target={target} is no KL to hold; give more than 0")
    if not horizon > MAX_ERROR * n_samples:
        raise ValueError(
            f"horizon={horizon} is so short that one rollout of {n_samples} responses could turn the weight "
            f"negative; give well above {MAX_ERROR * n_samples:g}"
        )
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return weight * (1 + error * n_samples / horizon)
