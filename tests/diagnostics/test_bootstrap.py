import pytest
import torch

from lit_rlkv.diagnostics.bootstrap import Estimate, bootstrap_mean
from lit_rlkv.rng import stream


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
    assert interval([0.0, 1.0], level) == Estimate(0.5, low, high)


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


def test_what_does_not_vary_has_an_interval_without_width():
    assert interval([0.3]) == Estimate(0.3, 0.3, 0.3)
    assert interval([1.0] * 50) == Estimate(1.0, 1.0, 1.0)


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
        ([], 0.95, 100, "no mean of no prompts"),
        ([1.0], 95.0, 100, r"level=95\.0 is no probability"),
        ([1.0], 0.95, 0, "n_resamples=0 draws nothing"),
    ],
)
def test_what_has_no_interval_is_refused(values, level, n_resamples, says):
    with pytest.raises(ValueError, match=says):
        interval(values, level, n_resamples)
