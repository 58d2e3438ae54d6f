from random import Random

import pytest

from lit_rlkv.evaluation.intervals import (
    accuracy_interval,
    clustered_share,
    mean_interval,
    t_level,
    t_quantile,
    wilson,
)
from lit_rlkv.evaluation.results import EvalRow


def width(found):
    return found.high - found.low


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


@pytest.mark.parametrize(("share", "n", "level"), [(0.5, 0, 0.95), (1.5, 10, 0.95), (0.5, 10, 1.0)])
def test_wilson_interval_refuses_what_is_no_share(share, n, level):
    with pytest.raises(ValueError, match="needs a share from 0 to 1"):
        wilson(share, n, level)


@pytest.mark.parametrize(
    ("level", "n_free", "quantile"),
    [(0.95, 1, 12.70620), (0.95, 2, 4.30265), (0.95, 4, 2.77645), (0.9, 30, 1.69726), (0.95, 255, 1.96931)],
)
def test_quantiles_of_student_t_are_those_of_the_tables(level, n_free, quantile):
    assert t_quantile(level, n_free) == pytest.approx(quantile, rel=1e-5)
    assert t_level(quantile, n_free) == pytest.approx(level, abs=1e-6)


@pytest.mark.parametrize("level", [1e-12, 1 - 1e-16])
def test_extreme_levels_have_finite_quantiles(level):
    assert 0 < t_quantile(level, 3) < 1e20
    assert 0 <= wilson(0.5, 10, level).low <= 0.5


def test_one_sample_of_each_prompt_has_the_wilson_interval():
    assert clustered_share([1.0, 0.0, 1.0, 1.0], 1) == wilson(0.75, 4)


def test_clustered_interval_matches_hand_arithmetic():
    # Prompts 1, 1/2, 1/2, 0 with one more, ½ at 0 and ½ at 1: p = 2.5 / 5, s² = 2 / 5 − 1/4 = 0.15,
    # effective number 4 · 0.25 / 0.15 = 6.6667, t(3) = 3.182446, t² = 10.127962
    # half = 3.182446 / 2.519194 · √(0.25 / 6.6667 + 10.127962 / 177.7778) = 0.388281
    found = clustered_share([1.0, 0.5, 0.5, 0.0], 2)
    assert (found.low, found.value, found.high) == pytest.approx((0.111719, 0.5, 0.888281), abs=1e-5)


def test_samples_that_agree_count_once_and_samples_that_vary_count_each():
    same, varied = [0.0, 1.0] * 200, [0.5] * 400
    assert width(clustered_share(same, 8)) == pytest.approx(width(wilson(0.5, 400)), rel=0.01)
    assert width(clustered_share(varied, 8)) == pytest.approx(width(wilson(0.5, 3200)), rel=0.01)


def covered(interval, p, correlation, n_prompts=128, n_samples=4):
    """Share of 400 simulated evaluations whose interval holds the accuracy."""
    rng = Random(0)
    scale = (1 - correlation) / correlation
    n_covered = 0
    for _ in range(400):
        chances = [rng.betavariate(p * scale, (1 - p) * scale) for _ in range(n_prompts)]
        shares = [sum(rng.random() < chance for _ in range(n_samples)) / n_samples for chance in chances]
        found = interval(shares, n_samples)
        n_covered += found.low <= p <= found.high
    return n_covered / 400


@pytest.mark.parametrize("p", [0.5, 0.98])
def test_the_interval_covers_where_one_of_independent_samples_or_of_a_mean_does_not(p):
    assert covered(clustered_share, p, correlation=0.6) >= 0.925
    independent = covered(lambda shares, k: wilson(sum(shares) / len(shares), k * len(shares)), p, 0.6)
    assert independent < 0.85
    if p == 0.98:
        assert covered(lambda shares, _: mean_interval(shares), p, 0.6) < 0.925


@pytest.mark.parametrize("shares", [[], [1.5], [float("nan")]])
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(ValueError, match="shares must be from 0 to 1"):
        clustered_share(shares, 2)


def test_interval_of_a_mean_is_students():
    # mean 2, s = 1, t(2) = 4.302653: ± 2.484138
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.low, found.value, found.high) == pytest.approx((-0.484138, 2.0, 4.484138), abs=1e-6)
    assert width(mean_interval([4.0])) == 0
    with pytest.raises(ValueError, match="got 0 values"):
        mean_interval([])


@pytest.mark.parametrize(("accuracy", "n"), [(2.0, 10), (-0.5, 10), (float("nan"), 10), (0.5, 0)])
def test_an_accuracy_that_is_no_share_has_no_interval(accuracy, n):
    row = EvalRow("dense", None, accuracy, n, mean_length=1.0, kv_bytes=1, kl=0.0, replay_gap=0.0)
    assert accuracy_interval(row) is None
