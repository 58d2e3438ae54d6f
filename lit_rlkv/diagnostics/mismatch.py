"""How far a learner is from the sampler: verl's `rollout_corr/*`, from the log-probs of sampled tokens.

Names and formulas are those of verl/trainer/ppo/rollout_corr_helper.py in github.com/volcengine/verl, with
importance ratios of tokens (`rollout_is="token"`). ρ = learner / sampler, on the sampler's own tokens.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.diagnostics.scalars import Scalars
from lit_rlkv.masking import masked_mean

MAX_LOG_RATIO = 20.0
"""Bound on log ρ before it is exponentiated, as in verl: the square of a ratio must stay within float32."""

THRESHOLD = 2.0
"""Ratios above it are high, and those below its reciprocal low; verl's default."""

VETO = 1e-4
"""A token whose ratio is lower is a catastrophe, and a sequence that has one is vetoed."""


def off_policy(
    learner_logps: Float[Tensor, "batch seq"],
    sampler_logps: Float[Tensor, "batch seq"],
    is_action: Bool[Tensor, "batch seq"],
) -> Scalars:
    """KL, χ² and perplexities (verl's `compute_offpolicy_metrics`), in nats where they are logs.

    kl = E[−log ρ] and k3_kl = E[ρ − log ρ − 1] estimate KL(sampler ‖ learner) per token. chi2_token =
    E[ρ²] − 1, and chi2_seq = E[(Π ρ)²] − 1 over sequences, log ρ and log Π ρ kept within ±20. log_ppl is the
    mean of −log p over the tokens of a sequence; its mean over sequences is logged, that of its exponential
    (ppl), of the difference learner − sampler, its size and its exponential (ppl_ratio), and the extremes.
    """
    log_ratio = (learner_logps - sampler_logps).masked_fill(~is_action, 0.0)
    training = _row_means(-learner_logps, is_action)
    rollout = _row_means(-sampler_logps, is_action)
    difference = training - rollout
    return {
        "kl": masked_mean(-log_ratio, is_action),
        "k3_kl": masked_mean(log_ratio.exp() - log_ratio - 1, is_action),
        "chi2_token": masked_mean(_bounded_exp(log_ratio).square(), is_action) - 1,
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


def importance_ratios(log_ratio: Float[Tensor, "batch seq"], is_action: Bool[Tensor, "batch seq"]) -> Scalars:
    """The ratios before any truncation (verl's `compute_is_metrics`), log ρ kept within ±20.

    std and eff_sample_size = (E[w])² / E[w²] are of ratios clamped to [1/2, 2], so neither shows a heavy
    tail. `seq` statistics are of the mean ratio of each sequence.
    """
    ratio = _bounded_exp(log_ratio.masked_fill(~is_action, 0.0))
    clamped = ratio.clamp(1 / THRESHOLD, THRESHOLD)
    mean, square = masked_mean(clamped, is_action), masked_mean(clamped.square(), is_action)
    of_rows = _row_means(ratio, is_action)
    return {
        "rollout_is_mean": masked_mean(ratio, is_action),
        "rollout_is_std": (square - mean.square()).clamp(min=0).sqrt(),
        "rollout_is_max": ratio.masked_fill(~is_action, -torch.inf).max(),
        "rollout_is_min": ratio.masked_fill(~is_action, torch.inf).min(),
        "rollout_is_eff_sample_size": mean.square() / square,
        "rollout_is_ratio_fraction_high": masked_mean((ratio > THRESHOLD).float(), is_action),
        "rollout_is_ratio_fraction_low": masked_mean((ratio < 1 / THRESHOLD).float(), is_action),
        "rollout_is_seq_mean": of_rows.mean(),
        "rollout_is_seq_std": of_rows.std() if len(of_rows) > 1 else torch.zeros_like(of_rows[0]),
        "rollout_is_seq_max": of_rows.max(),
        "rollout_is_seq_min": of_rows.min(),
        "rollout_is_seq_max_deviation": (of_rows - 1).abs().max(),
        "rollout_is_seq_fraction_high": (of_rows > THRESHOLD).float().mean(),
        "rollout_is_seq_fraction_low": (of_rows < 1 / THRESHOLD).float().mean(),
    }


def rejections(
    log_ratio: Float[Tensor, "batch seq"],
    weight: Float[Tensor, "batch seq"],
    is_action: Bool[Tensor, "batch seq"],
) -> Scalars:
    """Shares of actions, and of sequences with any such action, that weigh 0, and that fall under the veto.

    Args:
        weight: of each action in the loss, by the correction of the run.
    """
    is_rejected = (weight == 0) & is_action
    is_catastrophe = (log_ratio < math.log(VETO)) & is_action
    return {
        "rollout_rs_masked_fraction": masked_mean(is_rejected.float(), is_action),
        "rollout_rs_seq_masked_fraction": is_rejected.any(dim=1).float().mean(),
        "rollout_is_catastrophic_token_fraction": masked_mean(is_catastrophe.float(), is_action),
        "rollout_is_veto_fraction": is_catastrophe.any(dim=1).float().mean(),
    }


def rollout_correction(
    learner_logps: Float[Tensor, "batch seq"],
    sampler_logps: Float[Tensor, "batch seq"],
    weight: Float[Tensor, "batch seq"],
    is_action: Bool[Tensor, "batch seq"],
) -> Scalars:
    """`rollout_corr/*` of one rollout: distances, ratios of tokens, what the run's correction rejects."""
    log_ratio = learner_logps - sampler_logps
    found = {
        **off_policy(learner_logps, sampler_logps, is_action),
        **importance_ratios(log_ratio, is_action),
        **rejections(log_ratio, weight, is_action),
    }
    return {f"rollout_corr/{name}": value for name, value in found.items()}


def dense_mismatch(
    dense_logps: Float[Tensor, "batch seq"],
    sampler_logps: Float[Tensor, "batch seq"],
    is_action: Bool[Tensor, "batch seq"],
) -> Scalars:
    """`kv/dense_*`: what `rollout_corr/*` says of a learner that sees every key, whatever the learner sees.

    `kv/dense_log_ratio_p99` is the 99th percentile of |log ρ| over all actions, in nats: the smallest value
    that 99 % of them do not exceed.
    """
    found = off_policy(dense_logps, sampler_logps, is_action)
    scalars = {f"kv/dense_{name}": value for name, value in found.items() if not name.startswith("rollout_")}
    size = (dense_logps - sampler_logps).abs()[is_action]
    rank = math.ceil(0.99 * len(size))
    scalars["kv/dense_log_ratio_p99"] = size.kthvalue(rank).values if rank else size.sum()
    return scalars


def _row_means(values: Tensor, is_action: Tensor) -> Float[Tensor, " batch"]:
    """Mean over the actions of each sequence; 0 where there are none."""
    return values.masked_fill(~is_action, 0.0).sum(dim=1) / is_action.sum(dim=1).clamp(min=1)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
