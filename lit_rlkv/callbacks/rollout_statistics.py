"""Scalars of each rollout, under the names of TRL and verl."""

import logging
import time

import torch
from torch import Tensor

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.diagnostics import as_floats
from lit_rlkv.diagnostics.evictions import affected_shares
from lit_rlkv.diagnostics.importance_ratios import replay_gap, rollout_correction
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.gae import discounted_sums, explained_variance, token_rewards
from lit_rlkv.experience.group_baselines import is_informative
from lit_rlkv.experience.reward import ENVIRONMENT, OWN
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.objectives.reduction import masked_mean, masked_sum
from lit_rlkv.rollout.turns import turn_starts
from lit_rlkv.types import Rewards

log = logging.getLogger(__name__)


def rollout_statistics(experience: Experience) -> dict[str, float]:
    """Return rewards, lengths, mismatch and cache bytes of the rollout of all ranks."""
    rollout = experience.rollout
    logps = (experience.old_logps, rollout.rollout_logps)
    lengths = rollout.response_mask.sum(dim=1).float()
    scalars = {
        **group_statistics(experience.rewards, experience.group_size),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1 - experience.has_eos.float().mean(),
        "num_tokens": lengths.sum(),
        **rollout_correction(*logps, experience.weights.weight, rollout.response_mask),
        **(replay_gap(*logps, rollout.response_mask) if experience.is_replayed else {}),
        **critic_statistics(experience),
        **reference_statistics(experience),
        **reward_statistics(experience.rewards),
    }
    if ENVIRONMENT in experience.rewards.components:
        scalars["completions/mean_turns"] = turn_starts(rollout.response_mask).sum(dim=1).float().mean()
    if experience.greedy_rewards is not None:
        scalars["reward/greedy"] = experience.greedy_rewards.mean()
    budget = {} if experience.budget is None else {"kv/budget": float(experience.budget)}
    rounds = {} if experience.n_rounds is None else {"rollout/rounds": float(experience.n_rounds)}
    own = {**budget, **rounds, **experience.curriculum}
    return {"kv/bytes": float(rollout.kv_bytes), **own, **as_floats(scalars)}


def recorded_bytes(experience: Experience) -> dict[str, float]:
    """Return the bytes of each record that replay reads, summed over the ranks."""
    found = experience.rollout.record.part_bytes
    total = experience.ranks.all_reduce_sum(
        torch.tensor(list(found.values()), device=experience.has_eos.device)
    )
    return {f"kv/recorded_bytes/{name}": float(n) for name, n in zip(found, total.tolist(), strict=True)}


def group_statistics(rewards: Rewards, group_size: int) -> dict[str, Tensor]:
    """Return mean and std of the valid scores, and the share of groups with zero reward std."""
    scores = rewards.scores.view(-1, group_size)
    is_valid = torch.ones_like(scores, dtype=torch.bool)
    if rewards.is_failed is not None:
        is_valid = ~rewards.is_failed.view(-1, group_size)
    n_valid = is_valid.sum(dim=1)
    mean = scores.masked_fill(~is_valid, 0.0).sum(dim=1) / n_valid.clamp(min=1)
    squares = (scores - mean[:, None]).square().masked_fill(~is_valid, 0.0).sum(dim=1)
    std = (squares / (n_valid - 1).clamp(min=1)).sqrt()
    return {
        "reward": masked_mean(scores, is_valid),
        "reward_std": masked_mean(std, n_valid > 1),
        "frac_reward_zero_std": (~is_informative(rewards.total.view(-1, group_size))).float().mean(),
    }


def reward_statistics(rewards: Rewards) -> dict[str, Tensor]:
    """Return the mean of each reward component before weights, and for reward functions the std too."""
    found = {}
    for name, scores in rewards.components.items():
        answered = scores[~scores.isnan()]
        if name in OWN:
            found[f"rewards/{name}"] = answered.mean()
            continue
        found[f"rewards/{name}/mean"] = answered.mean()
        found[f"rewards/{name}/std"] = answered.std(unbiased=len(answered) > 1)
    if rewards.is_failed is not None:
        found["reward/failed_fraction"] = rewards.is_failed.float().mean()
    return found


def critic_statistics(experience: Experience) -> dict[str, Tensor]:
    """Return the critic's explained variance: 1 − Var(returns − values) / Var(returns)."""
    values, rollout = experience.values, experience.rollout
    if values is None:
        return {}
    # Monte Carlo returns, because GAE returns contain the values to evaluate.
    response_mask = rollout.response_mask
    rewards = token_rewards(experience.rewards.total, response_mask, experience.kl_penalty)
    found = discounted_sums(rewards, response_mask, experience.gamma)
    return {"value/explained_variance": explained_variance(values, found, response_mask)}


def reference_statistics(experience: Experience) -> dict[str, Tensor]:
    """Return KL(π_old ‖ reference) per response (k1), as TRL's `objective/kl`, and its weight."""
    if experience.ref_logps is None:
        return {}
    log_ratio = experience.old_logps - experience.ref_logps
    response_mask = experience.rollout.response_mask
    return {
        "objective/kl": masked_sum(log_ratio, response_mask) / len(log_ratio),
        "objective/kl_weight": log_ratio.new_tensor(experience.kl_coef),
    }


class RolloutStatistics(RLCallback):
    """Adds the statistics of the rollout to the metrics of its iteration; must be the first callback.

    `tokens_per_second` does not include the time between rollout and update, in which diagnostics run.

    Args:
        cache: of the rollouts, for a warning if it evicts nothing in the first one; None: no warning.
    """

    def __init__(self, cache: CacheSpec | None = None) -> None:
        self._cache = None if cache is None or cache.is_dense else cache
        self._latest: dict[str, float] = {}
        self._collected_at = 0.0
        self._diagnostics_s = 0.0

    def on_rollout_end(self, experience: Experience) -> None:
        self._latest = rollout_statistics(experience.all_gather()) | recorded_bytes(experience)
        self._latest |= affected_shares(experience.rollout, experience.ranks.all_reduce_sum)
        is_first = experience.iteration == 0 and experience.ranks.rank == 0
        if is_first and self._cache is not None and self._latest["kv/affected_rows"] == 0:
            log.warning(self._cache.explain_no_evictions("cache.", experience.rollout.attention_mask))
        self._collected_at = time.perf_counter()

    def on_phase_start(self, phase: str, iteration: int) -> None:
        if phase == "update":
            self._diagnostics_s = time.perf_counter() - self._collected_at

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        metrics.update(self._latest)
        seconds = metrics["time/data"] - self._diagnostics_s
        metrics["tokens_per_second"] = self._latest["num_tokens"] / seconds
