"""Scalars of each rollout under the names that TRL and verl users already plot."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.advantages.gae import explained_variance, token_rewards
from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.data.credit import Experience
from lit_rlkv.masking import masked_mean, masked_sum

MAX_LOG_RATIO = 20.0
"""Bound on the log-ratio of a whole response, as in verl: its square must stay within float32."""


def rollout_correction(
    log_ratio: Float[Tensor, "batch seq"], is_action: Bool[Tensor, "batch seq"]
) -> dict[str, Tensor]:
    """verl's `rollout_corr/*` from log ρ = log π_old − log μ on the sampler's own tokens.

    kl = E[−log ρ] and k3_kl = E[ρ − log ρ − 1] estimate KL(μ ‖ π_old); chi2_token = E[ρ²] − 1; chi2_seq the
    same with the product of a response; eff_sample_size = (Σρ)² / (nΣρ²) over tokens.
    """
    log_ratio = log_ratio.masked_fill(~is_action, 0.0)
    ratio = log_ratio.exp()
    sequence_ratio = log_ratio.sum(dim=1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    square = masked_mean(ratio.square(), is_action)
    return {
        "rollout_corr/kl": masked_mean(-log_ratio, is_action),
        "rollout_corr/k3_kl": masked_mean(ratio - log_ratio - 1, is_action),
        "rollout_corr/chi2_token": square - 1,
        "rollout_corr/chi2_seq": sequence_ratio.square().mean() - 1,
        "rollout_corr/rollout_is_eff_sample_size": masked_mean(ratio, is_action).square() / square,
    }


def rollout_statistics(experience: Experience) -> dict[str, float]:
    """Rewards, lengths, mismatch and cache bytes of one rollout."""
    rollout, weights = experience.rollout, experience.weights
    rewards = experience.rewards.total.view(-1, experience.group_size)
    lengths = rollout.is_action.sum(dim=1).float()
    n_actions = rollout.is_action.sum().clamp(min=1)
    scalars = {
        "reward": rewards.mean(),
        "reward_std": rewards.std(dim=1, unbiased=experience.group_size > 1).mean(),
        "frac_reward_zero_std": (rewards.amax(dim=1) == rewards.amin(dim=1)).float().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/clipped_ratio": 1 - experience.has_eos.float().mean(),
        "num_tokens": lengths.sum(),
        "rollout_corr/rollout_is_mean": masked_mean(weights.weight, rollout.is_action),
        "rollout_corr/rollout_rs_masked_fraction": 1
        - (weights.weight > 0).logical_and(rollout.is_action).sum() / n_actions,
        "kv/bytes": torch.tensor(float(rollout.kv_bytes)),
        **rollout_correction(experience.old_logps - rollout.sampler_logps, rollout.is_action),
        **critic_statistics(experience),
        **reference_statistics(experience),
        **{f"rewards/{name}": part.mean() for name, part in experience.rewards.components.items()},
    }
    return {name: float(value) for name, value in scalars.items()}


def critic_statistics(experience: Experience) -> dict[str, Tensor]:
    """How much of the returns' variance the critic explains: 1 − Var(returns − values) / Var(returns)."""
    values, rollout = experience.values, experience.rollout
    if values is None:
        return {}
    # Monte Carlo returns: those of GAE contain the values that are to be judged.
    rewards = token_rewards(experience.rewards.total, rollout.is_action, experience.kl_penalty, 1.0)
    found = rewards.flip(1).cumsum(1).flip(1)
    return {"value/explained_variance": explained_variance(values, found, rollout.is_action)}


def reference_statistics(experience: Experience) -> dict[str, Tensor]:
    """KL(π_old ‖ reference) per response (k1), as TRL's `objective/kl`, and the weight it has."""
    if experience.ref_logps is None:
        return {}
    log_ratio = experience.old_logps - experience.ref_logps
    is_action = experience.rollout.is_action
    return {
        "objective/kl": masked_sum(log_ratio, is_action) / len(log_ratio),
        "objective/kl_weight": torch.tensor(experience.kl_weight),
    }


class RolloutStatistics(RLCallback):
    """Adds the statistics of the rollout to the metrics of its iteration; stands first of the callbacks."""

    def __init__(self) -> None:
        self._latest: dict[str, float] = {}

    def on_rollout_end(self, experience: Experience) -> None:
        self._latest = rollout_statistics(experience)

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        metrics.update(self._latest)
        metrics["tokens_per_second"] = self._latest["num_tokens"] / metrics["time/data"]
