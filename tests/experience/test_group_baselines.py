import math

import pytest
import torch
from torch import Tensor

from lit_rlkv.experience.gae import STD_FLOOR
from lit_rlkv.experience.group_baselines import (
    ESTIMATORS,
    Groups,
    broadcast_to_response,
    is_informative,
)

# Group means 1/2 and 1; the second group agrees.
REWARDS = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
RANDOM = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))


def advantages_of(name: str, rewards: Tensor, **given) -> Tensor:
    """Responses of one length with a reward each, its only part, unless more is given."""
    ones = torch.ones_like(rewards)
    options = {"is_valid": ones.bool(), "lengths": ones.int(), "parts": {"total": rewards}, "weights": {}}
    return ESTIMATORS[name](Groups(rewards, **options | given))


SIZES = 100 + 200 * torch.rand(16, generator=torch.Generator().manual_seed(0))
EQUAL = [
    torch.full((3, n), size) for n in (3, 7, 8, 12) for size in (0.1, 2345.6, 999_999.9, *SIZES.tolist())
]
"""Rewards whose mean in float32 is often not the reward itself."""


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_rewards_teach_nothing_however_large_they_are(name: str):
    assert any((rewards - rewards.mean()).any() for rewards in EQUAL)  # negative control
    for rewards in EQUAL:
        assert not advantages_of(name, rewards).any()
        is_valid = torch.ones_like(rewards, dtype=torch.bool)
        is_valid[0, 0] = False
        assert not advantages_of(name, rewards, is_valid=is_valid).any()


def test_grpo_matches_hand_arithmetic():
    # Deviations ±1/2, unbiased variance 4·(1/4)/3 = 1/3.
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert advantages_of("grpo", REWARDS)[0].tolist() == pytest.approx(
        [expected, -expected, expected, -expected]
    )


def test_dr_grpo_divides_by_no_deviation():
    assert advantages_of("dr_grpo", REWARDS).tolist() == [[0.5, -0.5, 0.5, -0.5], [0.0] * 4]


def test_rloo_is_the_reward_less_the_mean_of_the_others():
    advantages = advantages_of("rloo", RANDOM)
    for p, group in enumerate(RANDOM.tolist()):
        for i, reward in enumerate(group):
            others = group[:i] + group[i + 1 :]
            assert advantages[p, i].item() == pytest.approx(reward - sum(others) / len(others), abs=1e-6)


def test_reinforce_pp_divides_by_the_deviation_of_the_whole_batch():
    # Deviations ±1/2 four times and 0 four times: mean 0, unbiased variance 4·(1/4)/7 = 1/7.
    expected = 0.5 / (math.sqrt(1 / 7) + 1e-4)
    assert advantages_of("reinforce++", REWARDS)[0].tolist() == pytest.approx(
        [expected, -expected, expected, -expected]
    )


def test_batch_std_is_scale_rewards_batch_of_trl():
    # TRL 1.16, GRPOTrainer: (R − group mean) / (std of all rewards of the batch + 1e-4).
    rewards = RANDOM.double()
    flat = [reward for group in rewards.tolist() for reward in group]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in flat) / (len(flat) - 1))
    for group, found in zip(rewards.tolist(), advantages_of("batch_std", rewards).tolist(), strict=True):
        expected = [(reward - sum(group) / len(group)) / (std + 1e-4) for reward in group]
        assert found == pytest.approx(expected, rel=1e-12)
    assert (
        advantages_of("batch_std", rewards) - advantages_of("grpo", rewards)
    ).abs().max() > 0.1  # the std of the group
    assert (
        advantages_of("batch_std", rewards) - advantages_of("reinforce++", rewards)
    ).abs().max() > 0.01  # the std of what is centred


def test_gpg_is_scaled_by_the_share_of_rewards_that_are_not_zero_as_in_verl():
    # compute_gpg_outcome_advantage: (R − mean)·n / #(R ≠ 0); 6 of the 8 rewards are 1.
    torch.testing.assert_close(
        advantages_of("gpg", REWARDS), torch.tensor([[4.0, -4.0, 4.0, -4.0], [0.0] * 4]) / 6
    )


LENGTHS = torch.tensor([[3, 1, 7, 2, 5]] * 5 + [[1, 1, 1, 1, 1]])


def test_opo_is_the_reward_less_the_mean_by_lengths_as_in_verl():
    def by_length(rewards, lengths):
        return advantages_of("opo", rewards, lengths=lengths)

    rewards = RANDOM.double()
    for lengths, group, found in zip(
        LENGTHS.tolist(), rewards.tolist(), by_length(rewards, LENGTHS), strict=True
    ):
        baseline = sum(n * reward for n, reward in zip(lengths, group, strict=True)) / sum(lengths)
        assert found.tolist() == pytest.approx([reward - baseline for reward in group], rel=1e-12)
    assert (by_length(rewards, LENGTHS) - advantages_of("dr_grpo", rewards)).abs().amax(dim=1)[
        :5
    ].min() > 1e-3
    torch.testing.assert_close(
        by_length(rewards, LENGTHS)[5], advantages_of("dr_grpo", rewards)[5]
    )  # of equal lengths
    assert not any(by_length(equal, torch.arange(equal.numel()).view_as(equal)).any() for equal in EQUAL)
    assert not by_length(rewards[:, :1], LENGTHS[:, :1]).any()  # groups of one


PARTS = {"a": RANDOM.double(), "b": 100 * RANDOM.double().flip(0) ** 2, "c": torch.zeros(6, 5).double()}
WEIGHTS = {"a": 0.5, "b": 0.25}


def test_gdpo_is_normalize_then_sum_of_trl():
    # TRL 1.16: z-score of each reward in its group, weighted sum, (A − mean) / (std + 1e-4) over the batch.
    expected = torch.zeros(6, 5, dtype=torch.float64)
    for name, part in PARTS.items():
        for row, group in enumerate(part.tolist()):
            mean = sum(group) / len(group)
            std = math.sqrt(sum((reward - mean) ** 2 for reward in group) / (len(group) - 1))
            scores = [(reward - mean) / (std + 1e-4) for reward in group]
            expected[row] += WEIGHTS.get(name, 1.0) * torch.tensor(scores, dtype=torch.float64)
    expected = (expected - expected.mean()) / (expected.std() + 1e-4)
    summed = 0.5 * PARTS["a"] + 0.25 * PARTS["b"]
    found = advantages_of("gdpo", summed, parts=PARTS, weights=WEIGHTS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (found - advantages_of("grpo", summed)).abs().max() > 0.5  # where the large reward decides alone


def test_gdpo_leaves_failed_responses_out():
    is_valid = torch.arange(5).expand(6, 5) < 3
    broken = {name: part.masked_fill(~is_valid, math.nan) for name, part in PARTS.items()}
    found = advantages_of("gdpo", RANDOM, parts=broken, weights=WEIGHTS, is_valid=is_valid)
    whole = {name: part[:, :3] for name, part in PARTS.items()}
    alone = advantages_of("gdpo", RANDOM[:, :3], parts=whole, weights=WEIGHTS)
    torch.testing.assert_close(found[:, :3], alone, rtol=1e-12, atol=1e-12)
    assert not found[:, 3:].any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_of_a_group_sum_to_zero(name: str):
    advantages = advantages_of(name, RANDOM)
    torch.testing.assert_close(advantages.sum(dim=1), torch.zeros(6), rtol=0, atol=1e-5)
    assert advantages.abs().max() > 0.1


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_constant_added_to_all_rewards_changes_nothing(name: str):
    found = advantages_of(name, RANDOM + 3)
    torch.testing.assert_close(found, advantages_of(name, RANDOM), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo"])
def test_a_group_does_not_depend_on_the_other_groups(name: str):
    torch.testing.assert_close(advantages_of(name, RANDOM[2:3]), advantages_of(name, RANDOM)[2:3])


def test_only_groups_that_disagree_are_informative():
    assert is_informative(REWARDS).tolist() == [True, False]
    assert is_informative(torch.zeros(1, 4)).tolist() == [False]


def test_all_actions_of_a_response_share_its_advantage():
    response_mask = torch.tensor([[False, True, True], [False, True, False]])
    shared = broadcast_to_response(torch.tensor([2.0, -1.0]), response_mask)
    assert shared.tolist() == [[0.0, 2.0, 2.0], [0.0, -1.0, 0.0]]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_responses_without_a_reward_leave_the_others_as_if_they_were_alone(name):
    rewards = torch.tensor([[1.0, 0.0, 9.0, 9.0], [3.0, 1.0, 9.0, 9.0], [2.0, 9.0, 9.0, 9.0]])
    is_valid = rewards != 9.0
    found = advantages_of(name, rewards, is_valid=is_valid)
    alone = advantages_of(name, rewards[:2, :2])
    if name == "reinforce++":  # the std of the batch counts the third group's response too
        alone = torch.tensor([[0.5, -0.5], [1.0, -1.0]]) / (
            torch.tensor([0.5, -0.5, 1.0, -1.0, 0.0]).std() + STD_FLOOR
        )
    elif name == "batch_std":
        alone = torch.tensor([[0.5, -0.5], [1.0, -1.0]]) / (rewards[is_valid].std() + STD_FLOOR)
    elif name == "gdpo":  # as for reinforce++
        z = torch.tensor([[0.5, -0.5], [1.0, -1.0]]) / (torch.tensor([[0.5], [2.0]]).sqrt() + STD_FLOOR)
        alone = z / (torch.tensor([*z.flatten(), 0.0]).std() + STD_FLOOR)
    elif name == "gpg":  # four of five rewards are not 0
        alone = torch.tensor([[0.5, -0.5], [1.0, -1.0]]) * 5 / 4
    torch.testing.assert_close(found[:2, :2], alone)
    assert found[~is_valid].abs().sum() == 0
    assert found[2].abs().sum() == 0


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("n_valid", [0, 1])
def test_a_group_with_fewer_than_two_rewards_teaches_nothing(name, n_valid):
    is_valid = torch.arange(4).view(2, 2) < n_valid
    assert not advantages_of(name, torch.ones(2, 2), is_valid=is_valid).any()
