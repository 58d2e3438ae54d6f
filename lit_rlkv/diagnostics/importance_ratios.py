"""Statistics of importance ratios: verl's `rollout_corr/*`, and the effect of each correction.

Names and formulas are those of verl/trainer/ppo/rollout_corr_helper.py in github.com/volcengine/verl, version
0.9.1, with weights of tokens truncated at 2, the default there. ρ = learner / sampler, on the sampler's own
tokens.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.diagnostics import Scalars
from lit_rlkv.objectives.corrections import CORRECTIONS, WeightFn
from lit_rlkv.objectives.reduction import masked_mean

MAX_LOG_RATIO = 20.0
"""Bound on log ρ before it is exponentiated, as in verl: the square of a ratio must stay within float32."""

THRESHOLD = 2.0
"""Ratios above it are high, and those below its reciprocal low; verl's default."""

VETO = 1e-4
"""Tokens with a lower ratio are catastrophic; a sequence with one of them is vetoed."""


def off_policy(
    learner_logps: Float[Tensor, "batch seq"],
    rollout_logps: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
) -> Scalars:
    """Return KL, χ² and perplexities (verl's `compute_offpolicy_metrics`), in nats where they are logs.

    kl = E[−log ρ] and k3_kl = E[ρ − log ρ − 1] estimate KL(sampler ‖ learner) per token. chi2_token =
    E[ρ²] − 1, and chi2_seq = E[(Π ρ)²] − 1 over sequences, log ρ and log Π ρ kept within ±20. log_ppl is the
    mean of −log p over the tokens of a sequence. Means over sequences are of log_ppl, its exponential (ppl),
    and the difference learner − sampler, its size and exponential (ppl_ratio); also the extreme differences.
    """
    log_ratio = (learner_logps - rollout_logps).masked_fill(~response_mask, 0.0)
    training = _row_means(-learner_logps, response_mask)
    rollout = _row_means(-rollout_logps, response_mask)
    difference = training - rollout
    return {
        "kl": masked_mean(-log_ratio, response_mask),
        "k3_kl": masked_mean(log_ratio.exp() - log_ratio - 1, response_mask),
        "chi2_token": masked_mean(_bounded_exp(log_ratio).square(), response_mask) - 1,
        "chi2_seq": _bounded_exp(log_ratio.sum(dim=1)).square().mean() - 1,
        "training_ppl": training.exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_ppl": rollout.exp().mean(),
        "rollout_log_ppl": rollout.mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
    }


def importance_ratios(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Scalars:
    """Return statistics of the weights w = min(ρ, 2) (verl's `compute_is_metrics`), log ρ kept within ±20.

    eff_sample_size = (E[w])² / E[w²]. `seq` statistics are of the mean weight of each sequence. The fractions
    are of ρ itself, and of its mean over each sequence.
    """
    ratio = _bounded_exp(log_ratio.masked_fill(~response_mask, 0.0))
    weight = ratio.clamp(max=THRESHOLD)
    mean, square = masked_mean(weight, response_mask), masked_mean(weight.square(), response_mask)
    of_rows, raw_rows = _row_means(weight, response_mask), _row_means(ratio, response_mask)
    return {
        **_of_tokens_and_rows("rollout_is", weight, response_mask),
        "rollout_is_std": (square - mean.square()).clamp(min=0).sqrt(),
        "rollout_is_eff_sample_size": mean.square() / square,
        "rollout_is_ratio_fraction_high": masked_mean((ratio > THRESHOLD).float(), response_mask),
        "rollout_is_ratio_fraction_low": masked_mean((ratio < 1 / THRESHOLD).float(), response_mask),
        "rollout_is_seq_std": of_rows.std() if len(of_rows) > 1 else torch.zeros_like(of_rows[0]),
        "rollout_is_seq_max_deviation": (of_rows - 1).abs().max(),
        "rollout_is_seq_fraction_high": (raw_rows > THRESHOLD).float().mean(),
        "rollout_is_seq_fraction_low": (raw_rows < 1 / THRESHOLD).float().mean(),
    }


def untruncated_ratios(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Scalars:
    """Return `kv/ratio_*`: ρ before any truncation, and its mean over each sequence, log ρ within ±20."""
    ratio = _bounded_exp(log_ratio.masked_fill(~response_mask, 0.0))
    return _of_tokens_and_rows("kv/ratio", ratio, response_mask)


def _of_tokens_and_rows(name: str, values: Tensor, response_mask: Tensor) -> Scalars:
    """Return mean, maximum and minimum over the response tokens, and of the mean of each sequence."""
    of_rows = _row_means(values, response_mask)
    return {
        f"{name}_mean": masked_mean(values, response_mask),
        f"{name}_max": values.masked_fill(~response_mask, -torch.inf).max(),
        f"{name}_min": values.masked_fill(~response_mask, torch.inf).min(),
        f"{name}_seq_mean": of_rows.mean(),
        f"{name}_seq_max": of_rows.max(),
        f"{name}_seq_min": of_rows.min(),
    }


def rejections(
    log_ratio: Float[Tensor, "batch seq"],
    weight: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
) -> Scalars:
    """Return the shares of tokens, and of sequences with any such token, of weight 0 and under the veto.

    Args:
        weight: loss weight of each response token from the run's correction.
    """
    is_rejected = (weight == 0) & response_mask
    is_catastrophe = (log_ratio < math.log(VETO)) & response_mask
    return {
        "rollout_rs_masked_fraction": masked_mean(is_rejected.float(), response_mask),
        "rollout_rs_seq_masked_fraction": is_rejected.any(dim=1).float().mean(),
        "rollout_is_catastrophic_token_fraction": masked_mean(is_catastrophe.float(), response_mask),
        "rollout_is_veto_fraction": is_catastrophe.any(dim=1).float().mean(),
    }


def rollout_correction(
    learner_logps: Float[Tensor, "batch seq"],
    rollout_logps: Float[Tensor, "batch seq"],
    weight: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
) -> Scalars:
    """Return `rollout_corr/*` of one rollout: distances, weights and the correction's rejections.

    With them comes `kv/ratio_*`, the ratios before truncation.
    """
    log_ratio = learner_logps - rollout_logps
    found = {
        **off_policy(learner_logps, rollout_logps, response_mask),
        **importance_ratios(log_ratio, response_mask),
        **rejections(log_ratio, weight, response_mask),
    }
    scalars = {f"rollout_corr/{name}": value for name, value in found.items()}
    return scalars | untruncated_ratios(log_ratio, response_mask)


def dense_mismatch(
    dense_logps: Float[Tensor, "batch seq"],
    rollout_logps: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
) -> Scalars:
    """Return `kv/dense_*`: the distances of `rollout_corr/*` for a learner that sees every key.

    `kv/dense_log_ratio_p99` is the 99th percentile of |log ρ| over all response tokens, in nats.
    """
    found = off_policy(dense_logps, rollout_logps, response_mask)
    scalars = {f"kv/dense_{name}": value for name, value in found.items() if not name.startswith("rollout_")}
    scalars["kv/dense_log_ratio_p99"] = _p99((dense_logps - rollout_logps).abs()[response_mask])
    return scalars


def replay_gap(
    old_logps: Float[Tensor, "batch seq"],
    rollout_logps: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
) -> Scalars:
    """Return mean, 99th percentile and maximum of |log π_old − log μ| over all response tokens, in nats.

    π_old is the replayed policy before the update; `rollout_corr/k3_kl` is the k3 of the same ratios.
    """
    size = (old_logps - rollout_logps).abs()[response_mask]
    return {
        "kv/replay_gap_mean": size.sum() / max(len(size), 1),
        "kv/replay_gap_p99": _p99(size),
        "kv/replay_gap_max": size.max() if len(size) else size.sum(),
    }


def _p99(values: Float[Tensor, " token"]) -> Float[Tensor, ""]:
    """Return the 99th percentile by nearest rank; 0 without values."""
    rank = math.ceil(0.99 * len(values))
    return values.kthvalue(rank).values if rank else values.sum()


def _row_means(values: Tensor, response_mask: Tensor) -> Float[Tensor, " batch"]:
    """Return the mean over the response tokens of each sequence; 0 if there are none."""
    return values.masked_fill(~response_mask, 0.0).sum(dim=1) / response_mask.sum(dim=1).clamp(min=1)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


LogWeightFn = Callable[[Tensor, Tensor], Tensor]
"""From log ρ [batch, seq] and `response_mask` to the log of each token's weight; −inf is a weight of 0."""


def sequence_ratio(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """Return log Π ρ_t of the response at each of its tokens: the only unbiased weight, not truncated."""
    return log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)


def _log_weight(weigh: WeightFn) -> LogWeightFn:
    return lambda log_ratio, response_mask: weigh(log_ratio, response_mask).weight.log()


CORRECTION_WEIGHTS: dict[str, LogWeightFn] = {
    "token_ratio": lambda log_ratio, response_mask: log_ratio,
    "sequence_ratio": sequence_ratio,
    **{name: _log_weight(weigh) for name, weigh in CORRECTIONS.items()},
}
"""Corrections with their default options. No correction (all weights 1) is left out."""

TRUNCATING, REJECTING = ("tis",), ("mis", "sparse_rl")


def correction_statistics(
    log_ratio: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]
) -> Scalars:
    """Return `kv/arms/{arm}/*` from log ρ = log π_dense − log μ of the response tokens.

    ess = (Σ w)² / (n Σ w²) over all n response tokens, rejected tokens with weight 0 included; ess_seq is
    the same over responses, each with the mean weight of its tokens. mean_weight and max_weight are per
    token. rejected is the share of tokens with weight 0, clipped the share that weigh less than their ratio.
    Sums of logs keep products of long responses within the range of floats; weights are capped at e^20.
    """
    log_ratio = log_ratio.masked_fill(~response_mask, 0.0)
    scalars: Scalars = {}
    for name, log_weigh in CORRECTION_WEIGHTS.items():
        log_weight = log_weigh(log_ratio, response_mask).masked_fill(~response_mask, -torch.inf)
        found = _statistics(log_weight, response_mask)
        if name in TRUNCATING:
            is_clipped = log_weight < log_ratio - 1e-4  # the rounding of a weight's log is no clip
            found["clipped"] = masked_mean(is_clipped.float(), response_mask)
        if name in REJECTING:
            found["rejected"] = masked_mean((log_weight == -torch.inf).float(), response_mask)
        scalars |= {f"kv/arms/{name}/{statistic}": value for statistic, value in found.items()}
    return scalars


def _statistics(log_weight: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"]) -> Scalars:
    n_response_tokens = response_mask.sum(dim=1)
    of_rows = log_weight.logsumexp(dim=1) - n_response_tokens.clamp(min=1).log()
    of_tokens = log_weight[response_mask]
    mean = of_tokens.logsumexp(dim=0) - math.log(max(len(of_tokens), 1))
    return {
        "ess": effective_share(of_tokens),
        "ess_seq": effective_share(of_rows[n_response_tokens > 0]),
        "mean_weight": mean.clamp(max=MAX_LOG_RATIO).exp(),
        "max_weight": log_weight.max().clamp(max=MAX_LOG_RATIO).exp(),
    }


def effective_share(log_weight: Float[Tensor, "*lead sample"]) -> Float[Tensor, "*lead"]:
    """Effective sample size (Σ w)² / (n Σ w²) of n weights, from their logs: 1/n to 1; 0 where all are 0."""
    # The largest weight as the unit: only ratios matter, and sums of logs far from 0 would be rounded.
    log_weight = log_weight - log_weight.amax(dim=-1, keepdim=True)
    log_share = 2 * log_weight.logsumexp(dim=-1) - (2 * log_weight).logsumexp(dim=-1)
    return (log_share - math.log(log_weight.shape[-1])).exp().nan_to_num(nan=0.0)
