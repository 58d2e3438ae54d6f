"""Estimators of KL(π ‖ reference) from log-probs of tokens that π sampled (Schulman, 'Approximating KL')."""

from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO, MAX_K3 = 20.0, 10.0
"""Bounds of k3 in nats, those of verl: past them a single token, e^30 of it, would be the whole gradient."""


def k1(logps: Float[Tensor, "*shape"], ref_logps: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return log π − log ref: unbiased, high variance, may be negative."""
    return logps - ref_logps


def k2(logps: Float[Tensor, "*shape"], ref_logps: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return (log π − log ref)² / 2: biased, with an unbiased gradient of the KL."""
    return (logps - ref_logps).square() / 2


def k3(logps: Float[Tensor, "*shape"], ref_logps: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return ref/π − 1 − log(ref/π): unbiased and never negative; used by GRPO.

    It is at most `MAX_K3`, and has no gradient there.
    """
    # The inner bound keeps the gradient from being 0·∞.
    log_ratio = (ref_logps - logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio.expm1() - log_ratio).clamp(max=MAX_K3)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
"""Estimators for metrics, and for KL penalties in the reward, which carry no gradient."""

LOSSES = {"k2": k2, "k3": k3}
"""Estimators for losses; k1 is not one, because its expected gradient is 0."""


def bias_corrected(
    token_kl: Float[Tensor, "*shape"], logps: Float[Tensor, "*shape"], old_logps: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return KL·π/π_old; for k3 its expected gradient is that of the KL (DeepSeek-V3.2, arXiv:2512.02556).

    The ratio has a gradient, which matters also where it is 1.
    """
    return token_kl * (logps - old_logps).exp()


def kl_penalty(
    estimator: str,
    old_logps: Float[Tensor, "batch seq"],
    ref_logps: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
    weight: float | int,
) -> Float[Tensor, "batch seq"]:
    """Return weight·KL of each token, to subtract from the reward; `estimator` is a key of `ESTIMATORS`."""
    return weight * ESTIMATORS[estimator](old_logps, ref_logps).masked_fill(~response_mask, 0.0)


MAX_ERROR = 0.2
"""Bound on the relative error of the KL in one update of the coefficient."""


def adapted_weight(
    weight: float | int, kl: float, n_samples: int, *, target: float | int, horizon: float | int
) -> float:
    """Return the KL weight for the next rollout, higher if the KL is above its target (arXiv:1909.08593).

    It is weight·(1 + error·n_samples / horizon), with error = kl / target − 1 clamped to ±0.2. As in the
    paper's code, n_samples / horizon replaces the paper's constant gain.

    Args:
        weight: the weight for this rollout.
        kl: KL of this rollout, in the unit of `target`; the paper's is nats per response.
        n_samples: responses in this rollout.
        target: target KL, above 0.
        horizon: number of responses over which a constant relative error changes the weight by that error;
            above MAX_ERROR·n_samples, or the weight could become negative.
    """
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return weight * (1 + error * n_samples / horizon)
