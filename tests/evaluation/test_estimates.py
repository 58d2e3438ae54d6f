from itertools import combinations

import pytest
import torch

from lit_rlkv.evaluation.estimates import bootstrap_mean, estimate, pass_at_k
from lit_rlkv.evaluation.evaluator import ScoredResponse
from lit_rlkv.evaluation.results import IntervalEstimate, wilson
from lit_rlkv.rng import stream


def samples(scores_by_problem, n_tokens=3):
    return [
        ScoredResponse("dense", problem, j, f"{problem}=", "7", "7", n_tokens + problem, score)
        for problem, scores in enumerate(scores_by_problem)
        for j, score in enumerate(scores)
    ]


def found_in(given, ks, **changes):
    return estimate(given, ks, **{"level": 0.9, "n_resamples": 500, "seed": 0} | changes)


def test_means_are_over_problems():
    # pass@1 is 0, 1/4 and 1; pass@2 is 0, 1/2 and 1
    found = found_in(samples([[0.0] * 4, [0.0, 1.0, 0.0, 0.0], [1.0] * 4]), [1, 2])
    assert found.pass_at_k[1].value == pytest.approx(1.25 / 3)
    assert found.pass_at_k[2].value == pytest.approx(1.5 / 3)
    assert found.accuracy == found.pass_at_k[1]
    assert found.mean_length.value == pytest.approx(4.0)


def test_the_order_of_the_samples_does_not_matter():
    given = samples([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert found_in(given[::-1], [1, 2]) == found_in(given, [1, 2])


def test_a_partial_score_counts_for_the_accuracy_and_not_as_right():
    found = found_in(samples([[0.5, 0.5], [1.0, 0.5]]), [1, 2])
    assert found.accuracy.value == pytest.approx(0.625)
    assert found.pass_at_k[1].value == pytest.approx(0.25)
    assert found.pass_at_k[2].value == pytest.approx(0.5)


def test_many_samples_of_few_problems_do_not_narrow_the_interval():
    few, many = (found_in(samples([[0.0] * n, [1.0] * n]), [1]) for n in (1, 100))
    assert many.accuracy == few.accuracy
    assert few.accuracy.high - few.accuracy.low == 1.0


def test_more_than_the_samples_of_a_problem_is_refused():
    with pytest.raises(ValueError, match="pass@3 cannot be estimated from 2 samples"):
        found_in(samples([[0.0, 1.0]]), [3])


@pytest.mark.parametrize(
    ("n_samples", "n_right", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs hold the right one
        (5, 2, 3, 9 / 10),  # of the 10 triples only the one of the three wrong ones fails
        (5, 2, 4, 1.0),  # there are not 4 wrong ones
        (5, 0, 5, 0.0),
        (200, 1, 100, 1 / 2),  # C(200, 100) has 59 digits
    ],
)
def test_the_estimate_matches_hand_arithmetic(n_samples, n_right, k, expected):
    assert pass_at_k(n_samples, n_right, k) == expected


def test_it_is_the_share_of_sets_with_a_right_sample_and_not_a_power_of_the_accuracy():
    is_right = [True, True, False, False, False, False]
    sets = list(combinations(is_right, 3))
    share = sum(any(one) for one in sets) / len(sets)
    assert pass_at_k(6, 2, 3) == pytest.approx(share, abs=1e-15)
    plug_in = 1 - (1 - 2 / 6) ** 3
    assert abs(plug_in - share) > 0.05


def test_it_is_unbiased_where_the_plug_in_estimate_is_not():
    # Three samples, each right with chance 1/4: pass@2 is 1 - (3/4)^2 = 7/16.
    chances = [27 / 64, 27 / 64, 9 / 64, 1 / 64]
    expected = sum(p * pass_at_k(3, c, 2) for c, p in enumerate(chances))
    plug_in = sum(p * (1 - (1 - c / 3) ** 2) for c, p in enumerate(chances))
    assert expected == pytest.approx(7 / 16, abs=1e-15)
    assert plug_in < 7 / 16 - 0.05


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((4, 1, 5), "pass@5 cannot be estimated from 4 samples; give k from 1"),
        ((4, 1, 0), "pass@0 cannot be estimated"),
        ((4, 5, 2), "n_right=5 of n_samples=4 must be between"),
        ((4, -1, 2), "n_right=-1 of n_samples=4 must be between"),
    ],
)
def test_invalid_sample_counts_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        pass_at_k(*arguments)


def interval(values, level=0.95, n_resamples=4000, seed=0):
    values = torch.tensor(values, dtype=torch.float64)
    generator = stream(seed, "bootstrap")
    return bootstrap_mean(values, level=level, n_resamples=n_resamples, generator=generator)


@pytest.mark.parametrize(
    ("level", "low", "high"),
    [
        # Two prompts, one right: the mean of a resample is 0, 1/2, 1 with chances 1/4, 1/2, 1/4.
        (0.4, 0.5, 0.5),  # quantiles 0.3 and 0.7
        (0.6, 0.0, 1.0),  # quantiles 0.2 and 0.8
    ],
)
def test_two_prompts_give_the_quantiles_of_a_coin_tossed_twice(level, low, high):
    assert interval([0.0, 1.0], level) == IntervalEstimate(0.5, low, high)


@pytest.mark.parametrize(
    ("level", "low", "high"),
    [
        # Three prompts, one right: 0, 1/3, 2/3, 1 with chances 8, 12, 6 and 1 of 27, summed .30 .74 .96 1.
        (0.3, 1 / 3, 1 / 3),  # quantiles .35 and .65
        (0.5, 0.0, 2 / 3),  # quantiles .25 and .75
        (0.95, 0.0, 1.0),  # quantiles .025 and .975
    ],
)
def test_three_prompts_give_the_quantiles_of_a_binomial(level, low, high):
    found = interval([0.0, 0.0, 1.0], level, n_resamples=20_000)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)
    assert found.value == pytest.approx(1 / 3)


def test_equal_values_have_an_interval_without_width():
    assert interval([0.3]) == IntervalEstimate(0.3, 0.3, 0.3)
    assert interval([1.0] * 50) == IntervalEstimate(1.0, 1.0, 1.0)


def test_many_prompts_give_the_normal_interval():
    # 400 prompts, half of them right: 0.5 ± 1.96 * 0.5 / 20
    found = interval([0.0, 1.0] * 200)
    assert (found.low, found.high) == pytest.approx((0.451, 0.549), abs=0.004)
    assert interval([0.0, 1.0] * 50).low < found.low - 0.02


def test_the_seed_decides_the_resamples():
    values = torch.arange(30).double().tolist()
    assert interval(values) == interval(values)
    assert interval(values, seed=1) != interval(values)


def test_equal_generators_draw_the_same_prompts():
    values = torch.arange(30).double()
    found, doubled = interval(values.tolist()), interval((2 * values + 1).tolist())
    assert (doubled.low, doubled.high) == pytest.approx((2 * found.low + 1, 2 * found.high + 1))


@pytest.mark.parametrize(
    ("values", "level", "n_resamples", "says"),
    [
        ([], 0.95, 100, "values must hold at least one prompt"),
        ([1.0], 95.0, 100, r"level=95\.0 must be a probability"),
        ([1.0], 0.95, 0, "n_resamples=0 must be at least 1"),
    ],
)
def test_invalid_bootstrap_arguments_are_refused(values, level, n_resamples, says):
    with pytest.raises(ValueError, match=says):
        interval(values, level, n_resamples)


def test_wilson_interval_matches_hand_arithmetic():
    # z = 1.959964, z² = 3.841459; 8 of 10: centre (0.8 + 0.192073) / 1.384146 = 0.716740,
    # half 1.959964 / 1.384146 · √(0.016 + 0.009604) = 0.226577
    found = wilson(0.8, 10)
    assert (found.low, found.value, found.high) == pytest.approx((0.490162, 0.8, 0.943318), abs=1e-6)


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.0, 0.277533), (1.0, 0.722467, 1.0)])
def test_wilson_interval_of_none_or_all_right_is_no_point(share, low, high):
    # 0 of 10: the upper bound is z² / (n + z²) = 3.841459 / 13.841459
    found = wilson(share, 10)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-6)


def test_wilson_interval_narrows_with_problems_and_widens_with_the_level():
    def width(found):
        return found.high - found.low

    assert width(wilson(0.5, 1000)) < width(wilson(0.5, 100)) < width(wilson(0.5, 100, level=0.99))


@pytest.mark.parametrize(("share", "n", "level"), [(0.5, 0, 0.95), (1.5, 10, 0.95), (0.5, 10, 1.0)])
def test_wilson_interval_refuses_what_is_no_share(share, n, level):
    with pytest.raises(ValueError, match="needs a share from 0 to 1"):
        wilson(share, n, level)
