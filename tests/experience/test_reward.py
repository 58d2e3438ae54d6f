import json
import math
from dataclasses import replace

import pytest
import torch

from lit_rlkv.config.schema import RewardConfig
from lit_rlkv.experience.gae import whiten
from lit_rlkv.experience.reward import (
    RewardRule,
    RewardsFailedError,
    RunningMoments,
    accuracy_component,
    imputed,
    overlong_share,
)
from lit_rlkv.rewards import ExactMatch
from lit_rlkv.tasks import Recall
from lit_rlkv.tasks.problems import Problems
from lit_rlkv.tasks.rows import Table
from lit_rlkv.types import Problem

EXACT, LEARNED = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([3.0, 5.0, -1.0, 1.0])
PROMPTS_ALONE = Problems(
    Table("rows", [Problem("2+2=", "", "")], ["rows:1"]), answer_after=None, is_verifiable=False
)
ALL_END = torch.ones(4, dtype=torch.bool)
CUT_LAST = torch.tensor([True, True, True, False])
VALUES = torch.randn(60, generator=torch.Generator().manual_seed(0)) * 3 + 5


def config_of(**options) -> RewardConfig:
    """The task's score as the reward, unless the options say otherwise."""
    return RewardConfig(**{"verifier": 1.0} | options)


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
    assert total_of(config_of(**weights)) == expected


@pytest.mark.parametrize("normalize", ["none", "batch", "running"])
def test_logged_rewards_keep_the_units_of_the_components(normalize: str):
    config = RewardConfig(verifier=2.0, learned=1.0, normalize=normalize, clip=0.1, missing_eos_penalty=1.0)
    rewards = RewardRule(config)({"exact_match": EXACT, "learned": LEARNED}, CUT_LAST)
    assert torch.equal(rewards.scores, 2.0 * EXACT + LEARNED)
    assert not torch.equal(rewards.scores, rewards.total)
    for name, given in {"exact_match": EXACT, "learned": LEARNED}.items():
        assert torch.equal(rewards.components[name], given)


def test_normalised_rewards_have_mean_zero_and_one_deviation():
    # 3, 5, −1, 1: mean 2, deviations 1, 3, −3, −1, unbiased variance 20/3
    std = math.sqrt(20 / 3) + 1e-4
    found = total_of(RewardConfig(verifier=0.0, learned=1.0, normalize="batch"))
    assert found == pytest.approx([1 / std, 3 / std, -3 / std, -1 / std])


def test_running_normalisation_takes_in_all_rewards_so_far():
    rule = RewardRule(config_of(normalize="running"))
    rule({"exact_match": torch.tensor([0.0, 2.0])}, ALL_END[:2])
    # 0, 2, 4 and 6 by now: mean 3, unbiased variance (9 + 1 + 1 + 9) / 3
    std = math.sqrt(20 / 3) + 1e-4
    second = rule({"exact_match": torch.tensor([4.0, 6.0])}, ALL_END[:2]).total
    assert second.tolist() == pytest.approx([1 / std, 3 / std])
    alone = RewardRule(config_of(normalize="running"))({"exact_match": torch.tensor([4.0, 6.0])}, ALL_END[:2])
    assert alone.total.tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-3)


def test_the_moments_come_back_with_the_state():
    config = config_of(normalize="running")
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
    rule = RewardRule(config_of(normalize="running", missing_eos_penalty=100.0))
    rule({"exact_match": EXACT}, CUT_LAST)
    assert rule.state_dict()["mean"] == pytest.approx(0.5)


def test_a_weight_without_its_component_is_refused():
    rule = RewardRule(RewardConfig(verifier=0.5, learned=0.5))
    with pytest.raises(ValueError, match=r"learned=0\.5 needs the score learned"):
        rule({"exact_match": EXACT}, ALL_END)
    with pytest.raises(ValueError, match=r"verifier=1\.0 needs the score"):
        RewardRule(config_of())({"learned": LEARNED}, ALL_END)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"verifier": 0.0}, "weight"),
        ({"verifier": 0.0, "functions": {"a": ExactMatch(weight=0)}}, "weight"),
        ({"functions": {"learned": ExactMatch()}}, "learned"),
        ({"functions": {"a/b": ExactMatch()}}, "a/b"),
        ({"accuracy": "a"}, "accuracy"),
        ({"functions": {"b": ExactMatch()}, "accuracy": "a"}, "accuracy"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict, key: str):
    functions = options.pop("functions", {})
    with pytest.raises(ValueError, match=key):
        RewardRule(config_of(**options), functions)


@pytest.mark.parametrize(
    ("options", "component"),
    [
        ({"verifier": 1.0}, "exact_match"),
        ({"verifier": 1.0, "environment": 1.0}, "exact_match"),
        ({"verifier": 0.0, "environment": 1.0}, "environment"),
        ({"verifier": 1.0, "accuracy": "environment"}, "environment"),
        ({"verifier": 0.0, "environment": 1.0, "accuracy": "a"}, "a"),
        ({"verifier": 0.0}, "exact_match"),
    ],
)
def test_evaluations_score_by_the_environment_where_the_verifier_has_no_weight(options: dict, component: str):
    config, functions = RewardConfig(**options), {"a": ExactMatch()}
    RewardRule(config, functions)
    assert accuracy_component(config, functions, Recall()) == component


@pytest.mark.parametrize(
    ("weights", "component"),
    [
        ({"a": 1.0}, "a"),
        ({"a": 1.0, "b": -0.5, "seen": 0}, "a"),
        ({"a": 1.0, "b": 0.1}, None),
        ({"b": -0.5}, None),
        ({}, None),
    ],
)
def test_what_a_task_does_not_verify_is_counted_by_the_only_rewarded_function(weights: dict, component):
    functions = {name: ExactMatch(weight=weight) for name, weight in weights.items()}
    config = RewardConfig(verifier=0.0, learned=1.0)
    assert accuracy_component(config, functions, PROMPTS_ALONE) == component
    assert accuracy_component(replace(config, environment=1.0), functions, PROMPTS_ALONE) == "environment"


NAN = float("nan")
FUNCTIONS = {"a": ExactMatch(weight=2.0), "b": ExactMatch(weight=-0.5), "seen": ExactMatch(weight=0)}


def rewards_of(a: list[float], b: list[float], seen: list[float] | None = None, group_size=4, **options):
    config = RewardConfig(**{"verifier": 0.0, "max_failed": 1.0} | options)
    scores = {"a": a, "b": b, "seen": seen or [0.0] * len(a)}
    components = {name: torch.tensor(values) for name, values in scores.items()}
    return RewardRule(config, FUNCTIONS)(
        components, torch.ones(len(a), dtype=torch.bool), group_size, {"a": "boom"}
    )


def test_functions_are_weighed_like_any_component():
    rewards = rewards_of([1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0])
    assert rewards.total.tolist() == [1.5, -0.5, 2.0, 0.0]
    assert rewards.is_failed.tolist() == [False] * 4
    assert RewardRule(config_of())({"exact_match": EXACT}, ALL_END).is_failed is None


def test_a_response_without_a_reward_gets_the_mean_of_its_groups_others():
    # groups of two: 2·1 and failed; failed and −0.5·1; both failed: the mean of all others, 0.75
    rewards = rewards_of([1.0, NAN, 0.0, 0.0, NAN, 1.0], [0.0, 0.0, NAN, 1.0, 0.0, NAN], group_size=2)
    assert rewards.total.tolist() == [2.0, 2.0, -0.5, -0.5, 0.75, 0.75]
    assert rewards.is_failed.tolist() == [False, True, True, False, True, True]
    assert torch.equal(rewards.scores, rewards.total)
    assert rewards.components["a"].isnan().tolist() == [False, True, False, False, True, False]


def test_a_function_without_weight_may_fail():
    rewards = rewards_of([1.0, 0.0], [0.0, 0.0], [NAN, NAN], group_size=2)
    assert rewards.total.tolist() == [2.0, 0.0]
    assert not rewards.is_failed.any()


def test_failed_rewards_do_not_enter_a_normalisation():
    a = [3.0, 5.0, NAN, -1.0, 1.0]
    std = math.sqrt(4 * 20 / 3) + 1e-4  # twice 3, 5, −1, 1: mean 4, unbiased variance 4 · 20/3
    expected = [2 / std, 6 / std, 0.0, -6 / std, -2 / std]
    for normalize in ("batch", "running"):
        total = rewards_of(a, [0.0] * 5, group_size=5, normalize=normalize).total
        assert total.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_group_that_agrees_agrees_still_whatever_its_mean_rounds_to():
    for value in torch.rand(200):
        total = imputed(value.repeat(7), torch.arange(7) == 3, 7)
        assert torch.equal(total, value.repeat(7))


def test_too_many_failures_stop_the_run_and_say_why():
    assert rewards_of([NAN, NAN, 1.0, 1.0], [0.0] * 4, max_failed=0.5).is_failed.sum() == 2
    with pytest.raises(
        RewardsFailedError, match=r"3 of 4 responses .* reward\.max_failed=0\.5 .*\(a: boom\)"
    ):
        rewards_of([NAN, NAN, NAN, 1.0], [0.0] * 4, max_failed=0.5)


@pytest.mark.parametrize("size", [1.001e6, 1e20, 1e39, math.inf, NAN])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_score_of_the_task_or_the_reward_model_that_is_too_large_fails(size: float, sign: int):
    rule = RewardRule(config_of(learned=1.0))
    for name in ("exact_match", "learned"):
        components = {"exact_match": EXACT, "learned": LEARNED}
        components[name] = torch.where(torch.arange(4) == 1, torch.tensor(sign * size), components[name])
        rewards = rule(components, ALL_END, group_size=4)
        assert rewards.is_failed.tolist() == [False, True, False, False]
        assert rewards.total.tolist() == pytest.approx([4.0, 5 / 3, 0.0, 1.0])


def test_a_weighted_sum_that_is_too_large_fails_though_no_score_is():
    # 2e6·a − 0.5·b, for a of 0.5 and 1: the one is at the bound, the other above
    rule = RewardRule(RewardConfig(max_failed=0.5), {"a": ExactMatch(weight=2e6), "b": ExactMatch(weight=-1)})
    rewards = rule({"a": torch.tensor([0.5, 1.0]), "b": torch.zeros(2)}, ALL_END[:2], group_size=2)
    assert rewards.is_failed.tolist() == [False, True]
    assert rewards.total.tolist() == [1e6, 1e6]
    with pytest.raises(
        RewardsFailedError, match=r"1 of 1 .*weighted sum must be numbers of size at most 1e\+06"
    ):
        rule({"a": torch.ones(1), "b": torch.zeros(1)}, ALL_END[:1])


def test_nothing_is_left_where_all_fail_and_that_is_allowed():
    for normalize in ("none", "batch", "running"):
        assert rewards_of([NAN, NAN], [0.0, 0.0], group_size=2, normalize=normalize).total.tolist() == [0, 0]


def moments_of(*batches: torch.Tensor) -> RunningMoments:
    moments = RunningMoments()
    for batch in batches:
        moments.update(batch)
    return moments


@pytest.mark.parametrize("rewards", [[2.0], [0.5, 0.5, 0.5], [2345.6] * 7, [999_999.9] * 12])
def test_rewards_that_do_not_vary_become_zero(rewards: list[float]):
    total = torch.tensor(rewards)
    assert whiten(total, torch.ones_like(total).bool()).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [1, 59], [59, 1], [7, 20, 0, 33]])
def test_running_moments_do_not_depend_on_the_split_into_batches(sizes: list[int]):
    moments = moments_of(*VALUES.split(sizes))
    expected = VALUES.double()
    assert moments.count == 60
    assert moments.mean == pytest.approx(expected.mean().item(), rel=1e-12)
    assert moments.std == pytest.approx(expected.std().item(), rel=1e-12)


def test_running_moments_keep_their_digits_far_from_zero():
    # Σx² − n·mean² would lose the variance of 1 beside 1e16 even in double precision.
    values = torch.tensor([1e8 - 1, 1e8, 1e8 + 1], dtype=torch.float64)
    assert moments_of(*values.split(1)).std == pytest.approx(1.0)
    assert (values.square().sum() - 3 * values.mean().square()).item() != pytest.approx(2.0, rel=0.1)


def test_the_std_is_zero_before_two_values():
    assert RunningMoments().std == 0.0
    assert moments_of(torch.tensor([3.0])).std == 0.0
    assert moments_of(torch.tensor([])).count == 0


def test_running_moments_resume_exactly_from_json():
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
def test_nan_and_infinite_rewards_are_refused_and_change_no_moments(junk: float):
    moments = moments_of(VALUES)
    before = moments.state_dict()
    with pytest.raises(ValueError, match="got 1 of 2 NaN or infinite"):
        moments.update(torch.tensor([1.0, junk]))
    assert moments.state_dict() == before


def test_the_soft_overlong_punishment_rises_over_the_buffer():
    # 10 tokens at most, of which the last 4 are the buffer: 0 up to 6 tokens, a quarter more for each one.
    n_tokens = torch.tensor([1, 6, 7, 10])
    assert overlong_share(n_tokens, 10, 4).tolist() == [0.0, 0.0, 0.25, 1.0]
    rule = RewardRule(config_of(overlong_buffer=4, overlong_penalty=2.0), max_new_tokens=10)
    rewards = rule({"exact_match": EXACT}, ALL_END, n_tokens=n_tokens)
    assert rewards.total.tolist() == [1.0, 0.0, 0.5, -2.0]
    assert rewards.scores.tolist() == EXACT.tolist()
    off = RewardRule(config_of(), max_new_tokens=10)({"exact_match": EXACT}, ALL_END, n_tokens=n_tokens)
    assert off.total.tolist() == EXACT.tolist()
