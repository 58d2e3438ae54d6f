"""What the names of W&B's distributions mean."""

import math
import random
import statistics

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.distributions import parse_parameters
from lit_rlkv.sweeping.parameters import Bounds


def parameter(**options):
    varied, _ = parse_parameters({"x": options})
    return varied[0]


def draws(found, n=20_000):
    """As a random search draws: uniform in the space, or in its logarithm."""
    source = random.Random(0)
    space = found.space
    assert isinstance(space, Bounds)
    if space.is_log:
        low, high = math.log(space.low), math.log(space.high)
        return [found.value(math.exp(source.uniform(low, high))) for _ in range(n)]
    return [found.value(source.uniform(space.low, space.high)) for _ in range(n)]


def test_a_range_of_whole_numbers_is_whole_and_any_other_is_not():
    assert parameter(min=1, max=4).space == Bounds(1, 4, is_whole=True)
    assert parameter(min=1, max=4).grid() == [1, 2, 3, 4]
    assert parameter(min=1.0, max=4).space == Bounds(1.0, 4.0)


def test_log_uniform_takes_logarithms_and_log_uniform_values_the_values():
    by_value = parameter(distribution="log_uniform_values", min=1e-4, max=1e-2)
    by_exponent = parameter(distribution="log_uniform", min=math.log(1e-4), max=math.log(1e-2))
    assert by_value.is_log
    assert by_exponent.is_log
    assert by_exponent.space.low == pytest.approx(by_value.space.low)
    assert by_exponent.space.high == pytest.approx(by_value.space.high)
    # Half of the draws lie below the geometric mean 1e-3, and not below the arithmetic one 5e-3.
    assert statistics.median(draws(by_value)) == pytest.approx(1e-3, rel=0.05)


def test_the_inverse_distributions_are_of_one_over_x():
    # where the logarithm of 1 over x is in 1 to 3, x is in e^-3 to e^-1
    found = parameter(distribution="inv_log_uniform", min=1, max=3)
    assert (found.space.low, found.space.high) == pytest.approx((math.exp(-3), math.exp(-1)))


def test_steps_round_to_multiples_and_stay_whole_where_they_are():
    found = parameter(distribution="q_uniform", min=0.0, max=1.0, q=0.25)
    assert found.grid() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [found.value(drawn) for drawn in (0.12, 0.13, 0.9)] == [0.0, 0.25, 1.0]
    whole = parameter(distribution="q_log_uniform_values", min=1, max=100, q=5)
    assert whole.value(13.0) == 15
    assert isinstance(whole.value(13.0), int)
    assert parameter(distribution="q_uniform", min=0.0, max=1.0, q=0.1).value(0.31) == 0.3


@pytest.mark.parametrize(
    ("low", "high", "step", "expected"),
    [(1, 5, 2, [2, 4]), (8, 20, 6, [12, 18]), (0.1, 0.5, 0.2, [0.2, 0.4]), (-3, 3, 3, [-3, 0, 3])],
)
def test_a_grid_of_steps_has_each_multiple_between_the_bounds_once(low, high, step, expected):
    found = parameter(distribution="q_uniform", min=low, max=high, q=step)
    assert found.grid() == expected
    assert [found.value(drawn) for drawn in found.grid()] == expected


def test_bounds_without_a_multiple_are_refused():
    with pytest.raises(ConfigError, match="no multiple of q=5 lies between min=1 and max=4"):
        parameter(distribution="q_uniform", min=1, max=4, q=5).grid()


@pytest.mark.parametrize("name", ["normal", "log_normal"])
def test_a_normal_has_its_mean_and_deviation(name):
    found = parameter(distribution=name, mu=-2.0, sigma=0.5)
    values = draws(found)
    logs = [math.log(value) for value in values] if name == "log_normal" else values
    # of 20,000 draws the standard error of the mean is 0.0035
    assert statistics.mean(logs) == pytest.approx(-2.0, abs=0.014)
    assert statistics.stdev(logs) == pytest.approx(0.5, abs=0.01)


def test_probabilities_are_the_shares_of_the_draws():
    found = parameter(values=["a", "b", "c"], probabilities=[1, 0, 3])
    values = draws(found)
    assert values.count("a") / len(values) == pytest.approx(0.25, abs=0.012)
    assert values.count("b") == 0
    assert [found.value(corner) for corner in found.corners()] == ["a", "c"]
    assert found.value(1.0) == "c"


def test_a_value_keeps_its_type_through_its_label():
    found = parameter(values=[16, 0.5, "h2o", True, [1, 2]])
    assert [found.value(label) for label in found.space] == [16, 0.5, "h2o", True, [1, 2]]


@pytest.mark.parametrize("kind", ["uniform", "log_uniform_values", "normal", "q_log_uniform_values"])
def test_a_grid_of_a_continuous_parameter_is_refused(kind):
    limits = {} if kind == "normal" else {"min": 1.0, "max": 2.0}
    with pytest.raises(ConfigError, match="this one is continuous"):
        parameter(distribution=kind, **limits).grid()
