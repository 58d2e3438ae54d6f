import json
import math
import re

import pytest
import torch

from lit_rlkv.data.rewarding import RewardConfig, RewardRule

EXACT, LEARNED = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([3.0, 5.0, -1.0, 1.0])
ALL_END = torch.ones(4, dtype=torch.bool)
CUT_LAST = torch.tensor([True, True, True, False])


def total_of(config: RewardConfig, has_eos: torch.Tensor = ALL_END) -> list[float]:
    return RewardRule(config)({"exact_match": EXACT, "learned": LEARNED}, has_eos).total.tolist()


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, [1.0, 0.0, 1.0, 0.0]),
        ({"verifier": 2.0}, [2.0, 0.0, 2.0, 0.0]),
        ({"verifier": 0.0, "learned": 1.0}, [3.0, 5.0, -1.0, 1.0]),
        ({"verifier": 0.5, "learned": 0.25}, [1.25, 1.25, 0.25, 0.25]),
    ],
)
def test_the_total_is_the_weighed_sum_of_the_components(weights: dict[str, float], expected: list[float]):
    assert total_of(RewardConfig(**weights)) == expected


def test_components_are_kept_as_they_are_whatever_they_weigh():
    config = RewardConfig(verifier=0.0, learned=2.0, normalize="batch", clip=0.1, missing_eos_penalty=1.0)
    rewards = RewardRule(config)({"exact_match": EXACT, "learned": LEARNED}, CUT_LAST)
    assert rewards.components.keys() == {"exact_match", "learned"}
    assert torch.equal(rewards.components["exact_match"], EXACT)
    assert torch.equal(rewards.components["learned"], LEARNED)


def test_normalised_rewards_have_mean_zero_and_one_deviation():
    # 3, 5, −1, 1: mean 2, deviations 1, 3, −3, −1, unbiased variance 20/3
    std = math.sqrt(20 / 3) + 1e-4
    found = total_of(RewardConfig(verifier=0.0, learned=1.0, normalize="batch"))
    assert found == pytest.approx([1 / std, 3 / std, -3 / std, -1 / std])


def test_running_normalisation_takes_in_all_rewards_so_far():
    rule = RewardRule(RewardConfig(normalize="running"))
    rule({"exact_match": torch.tensor([0.0, 2.0])}, ALL_END[:2])
    # 0, 2, 4 and 6 by now: mean 3, unbiased variance (9 + 1 + 1 + 9) / 3
    std = math.sqrt(20 / 3) + 1e-4
    second = rule({"exact_match": torch.tensor([4.0, 6.0])}, ALL_END[:2]).total
    assert second.tolist() == pytest.approx([1 / std, 3 / std])
    alone = RewardRule(RewardConfig(normalize="running"))(
        {"exact_match": torch.tensor([4.0, 6.0])}, ALL_END[:2]
    )
    assert alone.total.tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-3)


def test_the_moments_come_back_with_the_state():
    config = RewardConfig(normalize="running")
    rule = RewardRule(config)
    rule({"exact_match": torch.tensor([0.1, 0.7, 0.4, 2.0])}, ALL_END)
    restored = RewardRule(config)
    restored.load_state_dict(json.loads(json.dumps(rule.state_dict())))
    totals = [each({"exact_match": EXACT}, ALL_END).total for each in (rule, restored, RewardRule(config))]
    assert torch.equal(totals[0], totals[1])
    assert (totals[0] - totals[2]).abs().max() > 0.1


def test_rewards_are_normalised_then_clipped_and_pay_for_a_missing_end_last():
    # 3, 5, −1, 1 normalised: ±0.387 and ±1.162, clipped at 0.5; only then does the cut one pay 2.
    config = RewardConfig(verifier=0.0, learned=1.0, normalize="batch", clip=0.5, missing_eos_penalty=2.0)
    std = math.sqrt(20 / 3) + 1e-4
    assert total_of(config, CUT_LAST) == pytest.approx([1 / std, 0.5, -0.5, -1 / std - 2.0])
    # paid first, it would have moved the mean of all and been clipped itself
    paid_first = LEARNED - torch.tensor([0.0, 0.0, 0.0, 2.0])
    other = (paid_first - paid_first.mean()) / (paid_first.std() + 1e-4)
    assert other.clamp(-0.5, 0.5).tolist() != pytest.approx(total_of(config, CUT_LAST), abs=0.1)


def test_the_penalty_does_not_enter_the_running_moments():
    rule = RewardRule(RewardConfig(normalize="running", missing_eos_penalty=100.0))
    rule({"exact_match": EXACT}, CUT_LAST)
    assert rule.state_dict()["mean"] == pytest.approx(0.5)


def test_a_weight_without_its_component_is_refused():
    rule = RewardRule(RewardConfig(verifier=0.5, learned=0.5))
    with pytest.raises(ValueError, match=r"learned=0\.5 weighs a score that this run does not have"):
        rule({"exact_match": EXACT}, ALL_END)
    with pytest.raises(ValueError, match=r"verifier=1\.0 weighs a score"):
        RewardRule(RewardConfig())({"learned": LEARNED}, ALL_END)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"verifier": 0.0}, "verifier=0 and learned=0 leave no reward"),
        ({"normalize": "group"}, "normalize='group' is unknown; choose one of none, batch, running"),
        ({"clip": 0.0}, "clip=0.0 leaves no reward; give more than 0, or null for none"),
        ({"clip": -1.0}, "clip=-1.0 leaves no reward"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict, says: str):
    with pytest.raises(ValueError, match=re.escape(says)):
        RewardConfig(**options)
