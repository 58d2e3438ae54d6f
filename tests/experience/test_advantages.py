import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_rlkv.experience.advantages import (
    GAEAdvantage,
    GroupAdvantage,
    PairAdvantage,
    ReturnAdvantage,
)
from lit_rlkv.experience.batch import Experience
from lit_rlkv.objectives.corrections import ISWeights
from lit_rlkv.types import NEVER, Problem, Record, Rewards, Rollout

# One column of prompt, then responses of three, two, one and two actions.
LENGTHS = [3, 2, 1, 2]
COLUMNS = torch.arange(4)
IS_ACTION = torch.stack([(COLUMNS >= 1) & (1 + length > COLUMNS) for length in LENGTHS])


def make_experience(rewards: list[float], **given: Tensor) -> Experience:
    """Two prompts with two responses each; KL and values are 0 unless they are given."""
    zeros = torch.zeros(4, 4)
    attention_mask = IS_ACTION | (COLUMNS == 0)
    rollout = Rollout(
        input_ids=torch.arange(16).view(4, 4),
        attention_mask=attention_mask,
        response_mask=IS_ACTION,
        rollout_logps=zeros,
        record=Record(torch.where(attention_mask, NEVER, 0).int()[:, None, None]),
        kv_bytes=0,
    )
    problems = [Problem("a", "", ""), Problem("a", "", ""), Problem("b", "", ""), Problem("b", "", "")]
    return Experience(
        iteration=0,
        problems=problems,
        completions=["1 and more", "2", "three", "four"],
        rollout=rollout,
        rewards=Rewards(torch.tensor(rewards), {}),
        has_eos=torch.ones(4, dtype=torch.bool),
        old_logps=zeros,
        ref_logps=zeros,
        kl_coef=0.0,
        kl_penalty=given.get("kl_penalty", zeros),
        values=given.get("values"),
        weights=ISWeights(torch.ones(4, 4), IS_ACTION),
        group_size=2,
    )


def counting(experience: Experience, is_counted: Tensor) -> Experience:
    return replace(experience, weights=ISWeights(torch.ones(4, 4), is_counted))


PENALTY = torch.tensor(
    [[9.0, 0.1, 0.2, 0.3], [9.0, 0.0, 0.4, 9.0], [9.0, -0.2, 9.0, 9.0], [9.0, 0.0, 0.0, 9.0]]
)
PENALTY = PENALTY.masked_fill(~IS_ACTION, 0.0)


def test_a_group_is_judged_by_reward_less_the_kl_of_the_response():
    # 1 − 0.6 and 2 − 0.4: mean 1; 0 + 0.2 and 0: mean 0.1
    credit = GroupAdvantage("dr_grpo").compute(make_experience([1.0, 2.0, 0.0, 0.0], kl_penalty=PENALTY))
    expected = torch.tensor([-0.6, 0.6, 0.1, -0.1])[:, None] * IS_ACTION
    torch.testing.assert_close(credit.advantages, expected)
    without = GroupAdvantage("dr_grpo").compute(make_experience([1.0, 2.0, 0.0, 0.0]))
    torch.testing.assert_close(without.advantages, torch.tensor([-0.5, 0.5, 0.0, 0.0])[:, None] * IS_ACTION)
    assert credit.units.tolist() == [[0], [1], [2], [3]]
    assert credit.returns is None


def test_groups_that_agree_are_left_out_where_that_is_asked_for():
    experience = make_experience([1.0, 2.0, 0.5, 0.5])
    kept = GroupAdvantage("dapo", filter_zero_std_groups=True).compute(experience).is_counted
    assert kept.tolist() == (IS_ACTION & torch.tensor([True, True, False, False])[:, None]).tolist()
    assert torch.equal(GroupAdvantage("dapo").compute(experience).is_counted, IS_ACTION)


def test_opo_weighs_the_baseline_by_the_lengths_and_leaves_failures_out():
    # Lengths 3 and 2: baselines (3·1 + 2·2) / 5 = 1.4; the second group has one response left.
    experience = make_experience([1.0, 2.0, 0.5, 9.0])
    failed = replace(experience.rewards, is_failed=torch.tensor([False, False, False, True]))
    found = GroupAdvantage("opo").compute(replace(experience, rewards=failed)).advantages
    torch.testing.assert_close(found, torch.tensor([-0.4, 0.6, 0.0, 0.0])[:, None] * IS_ACTION)


def test_gdpo_scales_each_part_of_the_reward_and_keeps_groups_whose_parts_differ():
    experience = make_experience([0.0] * 4)
    parts = {"a": torch.tensor([1.0, 0.0, 2.0, 2.0]), "b": torch.tensor([0.0, 1.0, 5.0, 5.0])}
    weighted = 0.5 * parts["a"] + 0.25 * parts["b"]
    rewards = Rewards(
        weighted - torch.tensor([0.0, 0.1, 0.0, 0.0]), parts, None, weighted, {"a": 0.5, "b": 0.25}
    )
    found = GroupAdvantage("gdpo", filter_zero_std_groups=True).compute(replace(experience, rewards=rewards))
    assert found.is_counted.any(dim=1).tolist() == [True, True, False, False]
    # z = ±√½ of three parts, weights ½ − ¼ + 1 with the penalty: two of four responses differ from 0
    expected = torch.tensor([1.0, -1.0, 0.0, 0.0])[:, None] * 1.5**0.5 * IS_ACTION
    torch.testing.assert_close(found.advantages, expected, rtol=1e-2, atol=1e-6)
    unpenalised = replace(rewards, total=weighted)
    for weights, sign in [({"a": 0.5, "b": 0.25}, 1), ({"a": 0.25, "b": 0.5}, -1)]:
        given = replace(experience, rewards=replace(unpenalised, weights=weights))
        found = GroupAdvantage("gdpo").compute(given).advantages
        torch.testing.assert_close(found, sign * expected, rtol=1e-2, atol=1e-6)
    alone = GroupAdvantage("gdpo").compute(make_experience([1.0, 0.0, 2.0, 2.0]))  # the only part
    torch.testing.assert_close(alone.advantages, expected, rtol=1e-2, atol=1e-6)


def test_a_kl_in_the_reward_does_not_make_a_group_disagree():
    experience = make_experience([1.0, 2.0, 0.5, 0.5], kl_penalty=PENALTY)
    kept = GroupAdvantage("dapo", filter_zero_std_groups=True).compute(experience).is_counted
    assert kept.any(dim=1).tolist() == [True, True, False, False]


def test_tokens_that_a_correction_rejects_stay_out():
    is_counted = IS_ACTION & (COLUMNS != 2)
    experience = counting(make_experience([1.0, 2.0, 0.5, 0.5], values=torch.zeros(4, 4)), is_counted)
    assert torch.equal(GroupAdvantage("grpo").compute(experience).is_counted, is_counted)
    assert torch.equal(GAEAdvantage(1.0, 1.0).compute(experience).is_counted, is_counted)
    expected = is_counted & torch.tensor([True, True, False, False])[:, None]
    assert torch.equal(PairAdvantage().compute(experience).is_counted, expected)


VALUES = torch.tensor(
    [[7.0, 2.0, 4.0, 6.0], [7.0, 1.0, 1.0, 7.0], [7.0, 3.0, 7.0, 7.0], [7.0, 0.0, 2.0, 7.0]]
)
VALUES = VALUES.masked_fill(~IS_ACTION, 0.0)


def test_a_critic_gives_the_advantages_and_returns_of_hand_arithmetic():
    # γ = λ = 1/2, KL paid 0.1, 0.2, 0.3 in the first row and 0, 0.4 in the second, −0.2 in the third:
    # row 0: δ = −0.1 + 4/2 − 2, −0.2 + 6/2 − 4, 8 − 0.3 − 6 = −0.1, −1.2, 1.7; A = −0.29375, −0.775, 1.7
    # row 1: δ = 0 + 1/2 − 1, 1 − 0.4 − 1 = −0.5, −0.4; A = −0.6, −0.4
    # row 2: δ = 0 + 0.2 − 3; row 3: δ = 0 + 2/2 − 0, 4 − 2 = 1, 2; A = 1.5, 2
    experience = make_experience([8.0, 1.0, 0.0, 4.0], kl_penalty=PENALTY, values=VALUES)
    credit = GAEAdvantage(0.5, 0.5, whiten_advantages=False).compute(experience)
    expected = torch.tensor(
        [[0, -0.29375, -0.775, 1.7], [0, -0.6, -0.4, 0], [0, -2.8, 0, 0], [0, 1.5, 2.0, 0]]
    )
    torch.testing.assert_close(credit.advantages, expected)
    torch.testing.assert_close(credit.returns, expected + VALUES)
    assert credit.units.tolist() == [[0], [1], [2], [3]]

    # The eight advantages sum to 0.33125; whitening leaves the returns as they are.
    whitened = GAEAdvantage(0.5, 0.5).compute(experience)
    eight = [-0.29375, -0.775, 1.7, -0.6, -0.4, -2.8, 1.5, 2.0]
    mean = 0.33125 / 8
    std = math.sqrt(sum((a - mean) ** 2 for a in eight) / 7)
    assert whitened.advantages[IS_ACTION].tolist() == pytest.approx(
        [(a - mean) / (std + 1e-4) for a in eight]
    )
    assert torch.equal(whitened.returns, credit.returns)
    assert (whitened.advantages - credit.advantages).abs().max() > 0.1


def test_advantages_are_whitened_over_what_counts():
    is_counted = IS_ACTION & torch.tensor([True, True, False, True])[:, None]
    experience = make_experience([8.0, 1.0, 0.0, 4.0], kl_penalty=PENALTY, values=VALUES)
    found = GAEAdvantage(0.5, 0.5).compute(counting(experience, is_counted))
    counted = found.advantages[is_counted]
    assert counted.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert counted.std().item() == pytest.approx(1.0, abs=1e-3)
    assert (found.advantages[~is_counted] == 0).all()
    everything = GAEAdvantage(0.5, 0.5).compute(experience)
    assert abs(everything.advantages[is_counted].mean().item()) > 0.1
    assert torch.equal(found.returns, everything.returns)  # the critic learns from every action


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_plain_reinforce_pp_whitens_the_returns_of_verl(gamma: float):
    # verl 0.9, compute_reinforce_plus_plus_outcome_advantage: running returns from the last token on,
    # whitened over all tokens. verl adds 1e-8 to the variance, and here 1e-4 is added to the std.
    scores = [8.0, 1.0, 0.0, 4.0]
    returns: list[float] = []
    for row, length in enumerate(LENGTHS):
        running, of_row = 0.0, []
        for column in range(length, 0, -1):
            reward = (scores[row] if column == length else 0.0) - PENALTY[row, column].item()
            running = reward + gamma * running
            of_row.insert(0, running)
        returns += of_row
    mean = sum(returns) / len(returns)
    std = math.sqrt(sum((one - mean) ** 2 for one in returns) / (len(returns) - 1))
    experience = make_experience(scores, kl_penalty=PENALTY)
    found = ReturnAdvantage(gamma).compute(experience)
    assert found.advantages[IS_ACTION].tolist() == pytest.approx(
        [(one - mean) / (std + 1e-4) for one in returns], abs=1e-6
    )
    plain = ReturnAdvantage(gamma, whiten_advantages=False).compute(experience)
    assert plain.advantages[IS_ACTION].tolist() == pytest.approx(returns)
    assert (plain.advantages[~IS_ACTION] == 0).all()
    assert found.returns is None
    with_baseline = GroupAdvantage("reinforce++").compute(experience)
    assert (found.advantages - with_baseline.advantages).abs().max() > 0.1


def test_remax_is_the_return_less_the_greedy_reward_as_in_verl():
    # compute_remax_outcome_advantage: the sums of token rewards from t on, less the baseline of the prompt.
    totals, greedy = [8.0, 1.0, 2.0, 4.0], [3.0, 3.0, -1.0, -1.0]
    experience = make_experience(totals, kl_penalty=PENALTY)
    remax = ReturnAdvantage(whiten_advantages=False, greedy_baseline=True)
    found = remax.compute(replace(experience, greedy_rewards=torch.tensor(greedy))).advantages
    expected = torch.zeros(4, 4)
    for row, length in enumerate(LENGTHS):
        for t in range(1, 1 + length):
            expected[row, t] = totals[row] - float(PENALTY[row, t : 1 + length].sum()) - greedy[row]
    torch.testing.assert_close(found, expected)
    without = ReturnAdvantage(whiten_advantages=False).compute(experience).advantages
    assert (found - without).abs().max() > 1.0


def test_plain_reinforce_pp_whitens_over_what_counts():
    is_counted = IS_ACTION & torch.tensor([True, True, False, True])[:, None]
    experience = counting(make_experience([8.0, 1.0, 100.0, 4.0]), is_counted)
    counted = ReturnAdvantage().compute(experience).advantages[is_counted]
    assert counted.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert counted.std().item() == pytest.approx(1.0, abs=1e-3)


def test_the_better_response_of_a_pair_has_advantage_one_and_the_worse_minus_one():
    credit = PairAdvantage().compute(make_experience([1.0, 2.0, 0.5, 0.25]))
    assert credit.units.tolist() == [[1, 0], [2, 3]]
    assert torch.equal(credit.advantages, torch.tensor([-1.0, 1.0, 1.0, -1.0])[:, None] * IS_ACTION)
    assert torch.equal(credit.is_counted, IS_ACTION)
    assert credit.returns is None


@pytest.mark.parametrize(("drop_ties", "side"), [(True, 0.0), (False, 1.0)])
def test_a_tie_counts_nothing_unless_ties_are_kept(drop_ties: bool, side: float):
    credit = PairAdvantage(drop_ties=drop_ties).compute(make_experience([1.0, 2.0, 0.5, 0.5]))
    assert credit.units.tolist() == [[1, 0], [2, 3]]
    assert torch.equal(credit.advantages, torch.tensor([-1.0, 1.0, side, -side])[:, None] * IS_ACTION)
    assert credit.is_counted.any(dim=1).tolist() == [True, True, not drop_ties, not drop_ties]


@pytest.mark.parametrize(
    ("make", "options", "key"),
    [
        (GroupAdvantage, {"estimator": "gae"}, "estimator='gae'"),
        (GroupAdvantage, {"estimator": "grpo", "top_entropy_quantile": 1.2}, "top_entropy_quantile"),
        (GAEAdvantage, {"gamma": 1.5, "lam": 0.9}, "gamma=1.5"),
        (GAEAdvantage, {"gamma": 1.0, "lam": -0.1}, "lam=-0.1"),
        (GAEAdvantage, {"gamma": math.nan, "lam": 1.0}, "gamma=nan"),
        (ReturnAdvantage, {"gamma": 1.5}, "gamma=1.5"),
    ],
)
def test_options_that_cannot_work_are_refused(make, options, key):
    with pytest.raises(ValueError, match=key):
        make(**options)
