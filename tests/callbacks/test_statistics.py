import math

import pytest
import torch

from lit_rlkv.callbacks.statistics import RolloutStatistics, rollout_correction, rollout_statistics
from lit_rlkv.objectives.corrections import Correction, truncated, unweighted
from tests.training import make_datamodule, make_roles


def test_mismatch_matches_hand_arithmetic():
    # two actions with rho = 2 and 1/2, the third column is padding with garbage in it
    log_ratio = torch.tensor([[math.log(2.0), -math.log(2.0), math.nan]])
    is_action = torch.tensor([[True, True, False]])
    found = {name: float(value) for name, value in rollout_correction(log_ratio, is_action).items()}
    assert found == pytest.approx(
        {
            "rollout_corr/kl": 0.0,  # -(log 2 - log 2) / 2
            "rollout_corr/k3_kl": 0.25,  # ((2 - log 2 - 1) + (1/2 + log 2 - 1)) / 2
            "rollout_corr/chi2_token": 1.125,  # (4 + 1/4) / 2 - 1
            "rollout_corr/chi2_seq": 0.0,  # (2 * 1/2)^2 - 1
            "rollout_corr/rollout_is_eff_sample_size": 1.5625 / 2.125,  # 1.25^2 / 2.125
        },
        abs=1e-6,
    )


def test_statistics_describe_the_rollout():
    roles = make_roles()
    datamodule = make_datamodule(roles)
    experience = datamodule.collect()
    found = rollout_statistics(experience)
    rewards = experience.rewards.total.view(4, 4)
    n_uniform = sum(len(set(row)) == 1 for row in rewards.tolist())
    assert found["reward"] == pytest.approx(sum(rewards.flatten().tolist()) / 16)
    assert found["frac_reward_zero_std"] == n_uniform / 4
    assert found["num_tokens"] == int(experience.rollout.is_action.sum())
    assert found["kv/bytes"] == experience.rollout.kv_bytes
    assert found["rollout_corr/k3_kl"] == 0.0


def test_a_dense_learner_shows_its_mismatch():
    arm = Correction(samples_dense=False, replays=False, weigh=truncated)
    experience = make_datamodule(make_roles(), correction=arm).collect()
    found = rollout_statistics(experience)
    assert found["rollout_corr/k3_kl"] > 1e-3
    assert found["rollout_corr/rollout_is_eff_sample_size"] < 0.999
    dense = Correction(samples_dense=True, replays=False, weigh=unweighted)
    experience = make_datamodule(make_roles(), correction=dense).collect()
    assert rollout_statistics(experience)["rollout_corr/k3_kl"] == 0.0


def test_statistics_join_the_metrics_of_their_iteration():
    callback = RolloutStatistics()
    callback.on_rollout_end(make_datamodule(make_roles()).collect())
    metrics = {"time/data": 2.0}
    callback.on_iteration_end(1, 1, metrics)
    assert metrics["tokens_per_second"] == metrics["num_tokens"] / 2.0
