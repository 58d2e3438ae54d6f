"""The warning for rewards that are all equal."""

from dataclasses import replace

import pytest
import torch

from lit_rlkv.callbacks.reward_watch import N_ITERATIONS, RewardWatch
from tests.hand_built import make_datamodule, make_roles


@pytest.fixture(scope="module")
def experience():
    return make_datamodule(make_roles()).collect()


def with_rewards(experience, value, **changes):
    total = torch.full((len(experience.completions),), value)
    return replace(experience, rewards=replace(experience.rewards, total=total, weighted=None), **changes)


def watched(experiences, caplog):
    watch = RewardWatch()
    for experience in experiences:
        watch.on_rollout_end(experience)
    return [record.getMessage() for record in caplog.records]


def test_equal_rewards_of_the_first_iterations_are_warned_of_once(experience, caplog):
    has_eos = torch.arange(len(experience.completions)) % 4 > 0
    (said,) = watched([with_rewards(experience, 0.0, has_eos=has_eos)] * (N_ITERATIONS + 3), caplog)
    assert f"all responses of the first {N_ITERATIONS} iterations have the reward 0" in said
    assert "25% of them were cut at rollout.max_new_tokens" in said
    assert "task.system_prompt" in said
    assert "\n" not in said


def test_a_reward_of_one_everywhere_has_other_advice(experience, caplog):
    (said,) = watched([with_rewards(experience, 1.0)] * N_ITERATIONS, caplog)
    assert "choose a harder task" in said


def test_normalised_rewards_are_told_as_they_were(experience, caplog):
    normalised = with_rewards(experience, 0.0)
    before = torch.ones_like(normalised.rewards.total)
    normalised = replace(normalised, rewards=replace(normalised.rewards, weighted=before))
    (said,) = watched([normalised] * N_ITERATIONS, caplog)
    assert "have the reward 1, so" in said
    assert "choose a harder task" in said


@pytest.mark.parametrize("place", range(N_ITERATIONS))
def test_a_single_other_reward_is_enough(experience, caplog, place):
    equal = with_rewards(experience, 0.0)
    total = equal.rewards.total.clone()
    total[-1] = 1.0
    other = replace(equal, rewards=replace(equal.rewards, total=total))
    seen = [other if number == place else equal for number in range(N_ITERATIONS)]
    assert watched([*seen, *[equal] * N_ITERATIONS], caplog) == []


def test_fewer_iterations_say_nothing(experience, caplog):
    assert watched([with_rewards(experience, 0.0)] * (N_ITERATIONS - 1), caplog) == []


def test_a_penalty_counts_and_a_judge_silences(experience, caplog):
    rewards = with_rewards(experience, 0.0).rewards
    penalised = replace(rewards, weighted=torch.zeros_like(rewards.total), total=rewards.total.clone())
    penalised.total[::2] = -1.0  # missing_eos_penalty
    assert watched([replace(experience, rewards=penalised)] * N_ITERATIONS, caplog) == []
    verdicts = torch.zeros(len(experience.completions))
    assert watched([with_rewards(experience, 0.0, verdicts=verdicts)] * N_ITERATIONS, caplog) == []
