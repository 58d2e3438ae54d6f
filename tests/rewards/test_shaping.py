import json
import math

import pytest
import torch

from lit_rlkv.rewards.shaping import RunningMoments, clip_rewards, missing_eos_penalty, normalise_batch

VALUES = torch.randn(60, generator=torch.Generator().manual_seed(0)) * 3 + 5


def moments_of(*batches: torch.Tensor) -> RunningMoments:
    moments = RunningMoments()
    for batch in batches:
        moments.update(batch)
    return moments


def test_responses_that_were_cut_off_pay_the_penalty():
    rewards, has_eos = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([True, False, False])
    assert missing_eos_penalty(rewards, has_eos, 0.25).tolist() == [1.0, 0.75, -0.25]
    assert missing_eos_penalty(rewards, has_eos, 0.0).tolist() == rewards.tolist()
    assert rewards.tolist() == [1.0, 1.0, 0.0]


def test_normalised_rewards_match_hand_arithmetic():
    # Mean 3, deviations −2, −1, 0 and 3, unbiased variance 14/3.
    std = math.sqrt(14 / 3) + 1e-4
    found = normalise_batch(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    assert found.tolist() == pytest.approx([-2 / std, -1 / std, 0.0, 3 / std])


@pytest.mark.parametrize("rewards", [[2.0], [0.5, 0.5, 0.5], []])
def test_rewards_that_do_not_vary_become_zero(rewards: list[float]):
    assert normalise_batch(torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


def test_clipped_rewards_stay_within_the_bound():
    rewards = torch.tensor([-9.0, -1.0, 0.5, 9.0])
    assert clip_rewards(rewards, 2.0).tolist() == [-2.0, -1.0, 0.5, 2.0]
    assert clip_rewards(rewards, None).tolist() == rewards.tolist()


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [1, 59], [59, 1], [7, 20, 0, 33]])
def test_running_moments_do_not_depend_on_how_the_values_were_split(sizes: list[int]):
    moments = moments_of(*VALUES.split(sizes))
    expected = VALUES.double()
    assert moments.count == 60
    assert moments.mean == pytest.approx(expected.mean().item(), rel=1e-12)
    assert moments.std == pytest.approx(expected.std().item(), rel=1e-12)


def test_the_comparison_catches_deviations_summed_without_the_shift_of_the_mean():
    # Two batches of two means: the spread between them is part of the whole.
    first, second = torch.tensor([0.0, 2.0]), torch.tensor([10.0, 12.0])
    within = ((first - first.mean()).square().sum() + (second - second.mean()).square().sum()).item()
    assert within == 4.0
    assert moments_of(first, second).m2 == pytest.approx(4.0 + 4 * 5.0**2)


def test_running_moments_keep_their_digits_far_from_zero():
    # Σx² − n·mean² would lose the variance of 1 beside 1e16 even in double precision.
    values = torch.tensor([1e8 - 1, 1e8, 1e8 + 1], dtype=torch.float64)
    assert moments_of(*values.split(1)).std == pytest.approx(1.0)
    assert (values.square().sum() - 3 * values.mean().square()).item() != pytest.approx(2.0, rel=0.1)


def test_before_two_values_are_seen_there_is_no_deviation():
    assert RunningMoments().std == 0.0
    assert moments_of(torch.tensor([3.0])).std == 0.0
    assert moments_of(torch.tensor([])).count == 0


def test_the_state_goes_through_json_and_carries_on_exactly():
    first, second = VALUES.split(30)
    original = moments_of(first)
    restored = RunningMoments()
    restored.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert restored.state_dict() == original.state_dict()
    original.update(second)
    restored.update(second)
    assert restored.state_dict() == original.state_dict()
    assert restored.state_dict() != moments_of(second).state_dict()


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused_and_leaves_the_moments_alone(junk: float):
    moments = moments_of(VALUES)
    before = moments.state_dict()
    with pytest.raises(ValueError, match="1 of 2 rewards are NaN or infinite"):
        moments.update(torch.tensor([1.0, junk]))
    assert moments.state_dict() == before
