import math

import pytest
import torch

from lit_rlkv.experience.gae import whiten
from lit_rlkv.experience.group_baselines import (
    ESTIMATORS,
    STD_FLOOR,
    batch_std,
    broadcast_to_response,
    centred,
    gdpo,
    gpg,
    grpo,
    is_informative,
    opo,
    reinforce_pp,
    rloo,
    without_failures,
)

# Group means 1/2 and 1; the second group agrees.
REWARDS = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
RANDOM = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))


SIZES = 100 + 200 * torch.rand(16, generator=torch.Generator().manual_seed(0))
EQUAL = [
    torch.full((3, n), size) for n in (3, 7, 8, 12) for size in (0.1, 2345.6, 999_999.9, *SIZES.tolist())
]
"""Rewards whose mean in float32 is often not the reward itself."""


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_rewards_teach_nothing_however_large_they_are(name: str):
    assert any((rewards - rewards.mean()).any() for rewards in EQUAL)  # negative control
    for rewards in EQUAL:
        assert not ESTIMATORS[name](rewards).any()
        is_valid = torch.ones_like(rewards, dtype=torch.bool)
        is_valid[0, 0] = False
        assert not without_failures(ESTIMATORS[name], rewards, is_valid).any()


def test_grpo_matches_hand_arithmetic():
    # Deviations ±1/2, unbiased variance 4·(1/4)/3 = 1/3.
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert grpo(REWARDS)[0].tolist() == pytest.approx([expected, -expected, expected, -expected])


def test_dr_grpo_divides_by_no_deviation():
    assert centred(REWARDS).tolist() == [[0.5, -0.5, 0.5, -0.5], [0.0] * 4]


def test_rloo_is_the_reward_less_the_mean_of_the_others():
    advantages = rloo(RANDOM)
    for p, group in enumerate(RANDOM.tolist()):
        for i, reward in enumerate(group):
            others = group[:i] + group[i + 1 :]
            assert advantages[p, i].item() == pytest.approx(reward - sum(others) / len(others), abs=1e-6)


def test_reinforce_pp_divides_by_the_deviation_of_the_whole_batch():
    # Deviations ±1/2 four times and 0 four times: mean 0, unbiased variance 4·(1/4)/7 = 1/7.
    expected = 0.5 / (math.sqrt(1 / 7) + 1e-4)
    assert reinforce_pp(REWARDS)[0].tolist() == pytest.approx([expected, -expected, expected, -expected])


def test_batch_std_is_scale_rewards_batch_of_trl():
    # TRL 1.16, GRPOTrainer: (R − group mean) / (std of all rewards of the batch + 1e-4).
    rewards = RANDOM.double()
    flat = [reward for group in rewards.tolist() for reward in group]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in flat) / (len(flat) - 1))
    for group, found in zip(rewards.tolist(), batch_std(rewards).tolist(), strict=True):
        expected = [(reward - sum(group) / len(group)) / (std + 1e-4) for reward in group]
        assert found == pytest.approx(expected, rel=1e-12)
    assert (batch_std(rewards) - grpo(rewards)).abs().max() > 0.1  # the std of the group
    assert (batch_std(rewards) - reinforce_pp(rewards)).abs().max() > 0.01  # the std of what is centred


def test_gpg_is_scaled_by_the_share_of_rewards_that_are_not_zero_as_in_verl():
    # compute_gpg_outcome_advantage: (R − mean)·n / #(R ≠ 0); 6 of the 8 rewards are 1.
    torch.testing.assert_close(gpg(REWARDS), torch.tensor([[4.0, -4.0, 4.0, -4.0], [0.0] * 4]) / 6)


LENGTHS = torch.tensor([[3, 1, 7, 2, 5]] * 5 + [[1, 1, 1, 1, 1]])


def test_opo_is_the_reward_less_the_mean_by_lengths_as_in_verl():
    rewards = RANDOM.double()
    for lengths, group, found in zip(LENGTHS.tolist(), rewards.tolist(), opo(rewards, LENGTHS), strict=True):
        baseline = sum(n * reward for n, reward in zip(lengths, group, strict=True)) / sum(lengths)
        assert found.tolist() == pytest.approx([reward - baseline for reward in group], rel=1e-12)
    assert (opo(rewards, LENGTHS) - centred(rewards)).abs().amax(dim=1)[:5].min() > 1e-3
    torch.testing.assert_close(opo(rewards, LENGTHS)[5], centred(rewards)[5])  # of equal lengths
    assert not any(opo(equal, torch.arange(equal.numel()).view_as(equal)).any() for equal in EQUAL)
    assert not opo(rewards[:, :1], LENGTHS[:, :1]).any()  # groups of one


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
    everyone = torch.ones(6, 5, dtype=torch.bool)
    found = gdpo(PARTS, WEIGHTS, everyone)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    expected = (expected - expected.mean()) / (expected.std() + 1e-4)
    torch.testing.assert_close(whiten(found, everyone), expected, rtol=1e-12, atol=1e-12)
    summed = grpo(0.5 * PARTS["a"] + 0.25 * PARTS["b"])  # where the large reward decides alone
    assert (whiten(found, everyone) - summed).abs().max() > 0.5


def test_gdpo_leaves_failed_responses_out():
    is_valid = torch.arange(5).expand(6, 5) < 3
    broken = {name: part.masked_fill(~is_valid, math.nan) for name, part in PARTS.items()}
    found = gdpo(broken, WEIGHTS, is_valid)
    alone = gdpo({name: part[:, :3] for name, part in PARTS.items()}, WEIGHTS, is_valid[:, :3])
    torch.testing.assert_close(found[:, :3], alone, rtol=1e-12, atol=1e-12)
    assert not found[:, 3:].any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_of_a_group_sum_to_zero(name: str):
    advantages = ESTIMATORS[name](RANDOM)
    torch.testing.assert_close(advantages.sum(dim=1), torch.zeros(6), rtol=0, atol=1e-5)
    assert advantages.abs().max() > 0.1


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_constant_added_to_all_rewards_changes_nothing(name: str):
    torch.testing.assert_close(ESTIMATORS[name](RANDOM + 3), ESTIMATORS[name](RANDOM), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo"])
def test_a_group_does_not_depend_on_the_other_groups(name: str):
    torch.testing.assert_close(ESTIMATORS[name](RANDOM[2:3]), ESTIMATORS[name](RANDOM)[2:3])


def test_only_groups_that_disagree_are_informative():
    assert is_informative(REWARDS).tolist() == [True, False]
    assert is_informative(torch.zeros(1, 4)).tolist() == [False]


def test_all_actions_of_a_response_share_its_advantage():
    response_mask = torch.tensor([[False, True, True], [False, True, False]])
    shared = broadcast_to_response(torch.tensor([2.0, -1.0]), response_mask)
    assert shared.tolist() == [[0.0, 2.0, 2.0], [0.0, -1.0, 0.0]]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_responses_without_a_reward_leave_the_others_as_if_they_were_alone(name):
    estimate = ESTIMATORS[name]
    rewards = torch.tensor([[1.0, 0.0, 9.0, 9.0], [3.0, 1.0, 9.0, 9.0], [2.0, 9.0, 9.0, 9.0]])
    is_valid = rewards != 9.0
    found = without_failures(estimate, rewards, is_valid)
    alone = estimate(rewards[:2, :2])
    if name == "reinforce++":  # the std of the batch counts the third group's response too
        alone = torch.tensor([[0.5, -0.5], [1.0, -1.0]]) / (
            torch.tensor([0.5, -0.5, 1.0, -1.0, 0.0]).std() + STD_FLOOR
        )
    elif name == "batch_std":
        alone = torch.tensor([[0.5, -0.5], [1.0, -1.0]]) / (rewards[is_valid].std() + STD_FLOOR)
    elif name == "gpg":  # four of five rewards are not 0
        alone = torch.tensor([[0.5, -0.5], [1.0, -1.0]]) * 5 / 4
    torch.testing.assert_close(found[:2, :2], alone)
    assert found[~is_valid].abs().sum() == 0
    assert found[2].abs().sum() == 0
    full = torch.tensor([[1.0, 0.0, 3.0]])
    torch.testing.assert_close(without_failures(estimate, full, torch.ones_like(full).bool()), estimate(full))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("n_valid", [0, 1])
def test_a_group_with_fewer_than_two_rewards_teaches_nothing(name, n_valid):
    is_valid = torch.arange(4).view(2, 2) < n_valid
    assert without_failures(ESTIMATORS[name], torch.ones(2, 2), is_valid).tolist() == [[0.0, 0.0]] * 2
