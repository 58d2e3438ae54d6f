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


@pytest.mark.parametrize(
    ("reward", "reads_all_forms", "says"),
    [(0.0, False, "reward=math"), (0.0, True, "task.system_prompt"), (1.0, False, "harder task")],
)
def test_equal_rewards_of_the_first_iterations_are_warned_of_once(
    experience, caplog, reward, reads_all_forms, says
):
    watch = RewardWatch(reads_all_forms=reads_all_forms)
    has_eos = torch.arange(len(experience.completions)) % 4 > 0
    equal = with_rewards(experience, 0.0, has_eos=has_eos)
    # Rewards are told as they were before normalisation, which makes all of them 0.
    before = torch.full_like(equal.rewards.total, reward)
    equal = replace(equal, rewards=replace(equal.rewards, weighted=before))
    for _ in range(N_ITERATIONS + 3):
        watch.on_rollout_end(equal)
    assert len(caplog.records) == 1
    assert f"{reward:g}" in caplog.text
    assert says in caplog.text
    assert ("25%" in caplog.text) == (reward == 0)
    assert ("reward=math" in caplog.text) == (reward == 0 and not reads_all_forms)


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


def test_a_penalty_counts(experience, caplog):
    rewards = with_rewards(experience, 0.0).rewards
    penalised = replace(rewards, weighted=torch.zeros_like(rewards.total), total=rewards.total.clone())
    penalised.total[::2] = -1.0  # missing_eos_penalty
    assert watched([replace(experience, rewards=penalised)] * N_ITERATIONS, caplog) == []
