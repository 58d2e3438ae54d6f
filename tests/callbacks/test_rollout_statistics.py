import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from lit_rlkv.callbacks import rollout_statistics as statistics
from lit_rlkv.callbacks.rollout_statistics import (
    RolloutStatistics,
    critic_statistics,
    group_statistics,
    recorded_bytes,
    reference_statistics,
    reward_statistics,
    rollout_statistics,
)
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.objectives.corrections import Correction, masked, truncated, unweighted
from lit_rlkv.types import Rewards
from tests.hand_built import ARMS, REPLAY, make_datamodule, make_roles, shift


def test_statistics_describe_the_rollout():
    roles = make_roles()
    datamodule = make_datamodule(roles)
    experience = datamodule.collect()
    found = rollout_statistics(experience)
    rewards = experience.rewards.total.view(4, 4)
    n_uniform = sum(len(set(row)) == 1 for row in rewards.tolist())
    assert found["reward"] == pytest.approx(sum(rewards.flatten().tolist()) / 16)
    assert found["frac_reward_zero_std"] == n_uniform / 4
    assert found["num_tokens"] == int(experience.rollout.response_mask.sum())
    assert found["kv/bytes"] == experience.rollout.kv_bytes
    assert found["rollout_corr/k3_kl"] == 0.0


def test_the_bytes_of_what_replay_reads_are_counted():
    experience = make_datamodule(make_roles(), rollout={"top_k": 20}).collect()
    rollout = experience.rollout
    assert recorded_bytes(experience) == {
        "kv/recorded_bytes/evicted_at": 2 * rollout.evicted_at.numel(),
        # 20 ids for each response token, and a count for each column
        "kv/recorded_bytes/sampling_masks": 4 * (20 * int(rollout.response_mask.sum()))
        + 4 * rollout.input_ids.numel(),
    }
    whole = make_datamodule(make_roles()).collect()
    assert recorded_bytes(whole).keys() == {"kv/recorded_bytes/evicted_at"}


def test_a_dense_learner_shows_its_mismatch():
    arm = Correction(samples_dense=False, replays=False, weight_fn=truncated)
    experience = make_datamodule(make_roles(), correction=arm).collect()
    found = rollout_statistics(experience)
    assert found["rollout_corr/k3_kl"] > 1e-3
    assert found["rollout_corr/rollout_is_eff_sample_size"] < 0.999
    dense = Correction(True, False, unweighted, bypass_mode=True)
    experience = make_datamodule(make_roles(), correction=dense).collect()
    assert rollout_statistics(experience)["rollout_corr/k3_kl"] == 0.0


def test_replay_that_is_scored_shows_what_rounding_left_of_it():
    arm = Correction(samples_dense=False, replays=True, weight_fn=truncated)
    experience = make_datamodule(make_roles(), correction=arm).collect()
    found = rollout_statistics(experience)
    assert 0 < found["kv/replay_gap_mean"] <= found["kv/replay_gap_p99"] <= found["kv/replay_gap_max"] < 1e-4
    response_mask = experience.rollout.response_mask
    size = torch.linspace(0, 1, int(response_mask.sum()))
    noise = torch.zeros_like(experience.old_logps).masked_scatter(response_mask, size)
    sampled = replace(experience.rollout, rollout_logps=experience.old_logps - noise)
    found = rollout_statistics(replace(experience, rollout=sampled))
    rank = math.ceil(0.99 * len(size)) - 1
    expected = {"mean": 0.5, "p99": float(size[rank]), "max": 1.0}
    for name, value in expected.items():
        assert found[f"kv/replay_gap_{name}"] == pytest.approx(value, abs=1e-5)
    assert found["rollout_corr/k3_kl"] == pytest.approx(
        float((noise.exp() - noise - 1)[response_mask].mean())
    )
    for other in (REPLAY, ARMS["tis"]):  # π_old is the sampler; the gap of a dense learner is no rounding
        assert "kv/replay_gap_mean" not in rollout_statistics(
            make_datamodule(make_roles(), correction=other).collect()
        )


def test_a_critic_is_judged_by_returns_that_are_discounted_as_its_own():
    experience = make_datamodule(make_roles()).collect()
    response_mask = experience.rollout.response_mask
    n_left = response_mask.flip(1).cumsum(1).flip(1)
    total = torch.arange(16.0)
    values = torch.where(response_mask, total[:, None] * 0.9 ** (n_left - 1), 0.0)
    exact = replace(experience, rewards=Rewards(total, {}), values=values, gamma=0.9)
    assert float(critic_statistics(exact)["value/explained_variance"]) == pytest.approx(1.0, abs=1e-6)
    undiscounted = critic_statistics(replace(exact, gamma=1.0))["value/explained_variance"]
    assert float(undiscounted) < 0.999


def test_statistics_join_the_metrics_of_their_iteration():
    callback = RolloutStatistics()
    callback.on_rollout_end(make_datamodule(make_roles()).collect())
    metrics = {"time/data": 2.0}
    callback.on_iteration_end(1, 1, metrics)
    assert metrics["tokens_per_second"] == metrics["num_tokens"] / 2.0


@pytest.mark.parametrize(("budget", "warns"), [(7, False), (64, True)])
def test_a_first_rollout_without_evictions_is_warned_of(caplog, budget, warns):
    cache = CacheSpec(policy="random", budget=budget, interval=2, sink=1, window=2)
    callback = RolloutStatistics(cache)
    module = make_datamodule(make_roles(), spec=cache, rollout={"max_new_tokens": 20})
    for iteration in (1, 2):
        callback.on_rollout_end(replace(module.collect(), iteration=iteration - 1))
        metrics = {"time/data": 2.0}
        callback.on_iteration_end(iteration, 2, metrics)
        assert (metrics["kv/affected_rows"] == metrics["kv/affected"] == 0) is warns
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warns
    assert not warns or "cache.budget=64 with cache.interval=2 keeps all of them; lower the budget" in said[0]
    dense = make_datamodule(make_roles(), spec=CacheSpec.dense())
    RolloutStatistics(CacheSpec.dense()).on_rollout_end(dense.collect())
    assert len(caplog.records) == warns


def test_reward_functions_are_described_where_they_have_answered():
    scores = torch.tensor([1.0, float("nan"), 0.0, 1.0])
    rewards = Rewards(torch.zeros(4), {"learned": torch.ones(4), "format": scores}, scores.isnan())
    found = {name: float(value) for name, value in reward_statistics(rewards).items()}
    # 1, 0, 1: mean 2/3, unbiased variance (1/9 + 4/9 + 1/9) / 2 = 1/3
    assert found == pytest.approx(
        {
            "rewards/learned": 1.0,
            "rewards/format/mean": 2 / 3,
            "rewards/format/std": (1 / 3) ** 0.5,
            "reward/failed_fraction": 0.25,
        }
    )


def test_rewards_are_shown_as_they_were_before_normalisation_and_without_those_that_failed():
    scores = torch.tensor([0.0, 1.0, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0, 7.0, 7.0, 7.0, 3.0])
    failed = torch.tensor([0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0]).bool()
    total = (scores == 1.0).float()  # only the first group disagrees in what is learned from
    found = group_statistics(Rewards(total, {}, failed, weighted=scores), group_size=4)
    # valid: 0, 1; four times 2; a 3 that is alone and has no deviation
    assert float(found["reward"]) == pytest.approx((0 + 1 + 4 * 2 + 3) / 7)
    assert float(found["reward_std"]) == pytest.approx((0.5**0.5 + 0.0) / 2)
    assert float(found["frac_reward_zero_std"]) == pytest.approx(2 / 3)
    whole = group_statistics(Rewards(scores, {}), group_size=4)
    assert float(whole["reward_std"]) == pytest.approx(float(scores.view(-1, 4).std(dim=1).mean()))
    alone = group_statistics(Rewards(scores, {}), group_size=1)
    assert (float(alone["reward_std"]), float(alone["frac_reward_zero_std"])) == (0.0, 1.0)


def test_time_of_diagnostics_behind_the_rollout_does_not_slow_it_down(monkeypatch):
    callback, now = RolloutStatistics(), [100.0]
    monkeypatch.setattr(statistics.time, "perf_counter", lambda: now[0])
    callback.on_rollout_end(make_datamodule(make_roles()).collect())
    now[0] += 3.0  # diagnostics
    callback.on_phase_start("update", 0)
    now[0] += 9.0  # the update itself
    metrics = {"time/data": 5.0}
    callback.on_iteration_end(1, 1, metrics)
    assert metrics["tokens_per_second"] == metrics["num_tokens"] / (5.0 - 3.0)


def test_kl_to_the_reference_is_per_response_whatever_their_lengths():
    experience = make_datamodule(shift(make_roles())).collect()
    response_mask = torch.zeros_like(experience.rollout.response_mask)
    response_mask[0, -3:], response_mask[1:, -1:] = True, True  # 3 actions, and 15 responses of 1
    ref_logps = torch.full_like(experience.old_logps, -2.0)
    changed = replace(
        experience,
        rollout=replace(experience.rollout, response_mask=response_mask),
        old_logps=ref_logps + 0.5,
        ref_logps=ref_logps,
    )
    # 0.5 nats each: (3 + 15) · 0.5 over 16 responses; a mean over actions would be 0.5
    found = reference_statistics(changed)["objective/kl"]
    assert float(found) == pytest.approx(18 * 0.5 / 16)


def test_tokens_rejected_by_the_runs_correction_are_counted():
    narrow = Correction(samples_dense=False, replays=False, weight_fn=partial(masked, low=0.98, high=1.02))
    experience = make_datamodule(shift(make_roles(), std=0.1), correction=narrow).collect()
    response_mask = experience.rollout.response_mask
    is_rejected = response_mask & (experience.weights.weight == 0)
    found = rollout_statistics(experience)
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        float(is_rejected.sum() / response_mask.sum())
    )
    assert 0 < found["rollout_corr/rollout_rs_masked_fraction"] < 1
    naive = make_datamodule(shift(make_roles(), std=0.1), correction=ARMS["naive"]).collect()
    assert rollout_statistics(naive)["rollout_corr/rollout_rs_masked_fraction"] == 0.0
