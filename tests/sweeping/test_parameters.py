"""Parameters of a sweep file: W&B's distributions, and the combinations of their values."""

import math
import random
import statistics

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.parameters import LISTED, NUMERIC, combinations, parse_parameters
from lit_rlkv.sweeping.sweep_file import n_runs
from tests.sweeping.files import BAYES, GRID, plan_of


def parameter(**options):
    varied, _ = parse_parameters({"x": options})
    return varied[0]


def draws(found, n=20_000):
    """Return the draws of a random search: uniform in the space, or in its logarithm."""
    source = random.Random(0)
    if found.draws_log:
        low, high = math.log(found.low), math.log(found.high)
        return [found.value(math.exp(source.uniform(low, high))) for _ in range(n)]
    return [found.value(source.uniform(found.low, found.high)) for _ in range(n)]


def test_a_range_of_whole_numbers_is_whole_and_any_other_is_not():
    assert parameter(min=1, max=4).kind == "int_uniform"
    assert parameter(min=1, max=4).grid() == [1, 2, 3, 4]
    assert parameter(min=1.0, max=4).kind == "uniform"


def test_log_uniform_takes_logarithms_and_log_uniform_values_the_values():
    by_value = parameter(distribution="log_uniform_values", min=1e-4, max=1e-2)
    by_exponent = parameter(distribution="log_uniform", min=math.log(1e-4), max=math.log(1e-2))
    assert by_value.is_log
    assert by_exponent.is_log
    assert by_exponent.low == pytest.approx(by_value.low)
    assert by_exponent.high == pytest.approx(by_value.high)
    # Half of the draws lie below the geometric mean 1e-3, and not below the arithmetic one 5e-3.
    assert statistics.median(draws(by_value)) == pytest.approx(1e-3, rel=0.05)


def test_the_inverse_distributions_are_of_one_over_x():
    # where the logarithm of 1 over x is in 1 to 3, x is in e^-3 to e^-1
    found = parameter(distribution="inv_log_uniform", min=1, max=3)
    assert (found.low, found.high) == pytest.approx((math.exp(-3), math.exp(-1)))


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
    with pytest.raises(ConfigError, match=r"no multiple of q=5 lies between min=1\.0 and max=4\.0"):
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
    assert [found.value(label) for label in found.labels] == [16, 0.5, "h2o", True, [1, 2]]


@pytest.mark.parametrize("kind", ["uniform", "log_uniform_values", "normal", "q_log_uniform_values"])
def test_a_grid_of_a_continuous_parameter_is_refused(kind):
    limits = {} if kind == "normal" else {"min": 1.0, "max": 2.0}
    with pytest.raises(ConfigError, match="is continuous"):
        parameter(distribution=kind, **limits).grid()


def test_nested_names_are_joined_by_dots_and_constants_are_apart():
    varied, constants = parse_parameters(
        {
            "cache": {"parameters": {"budget": {"values": [12, 16]}, "policy": {"value": "h2o"}}},
            "stages": {"value": ["sft", "rl"]},
        }
    )
    assert [found.name for found in varied] == ["cache.budget"]
    assert constants == {"cache.policy": "h2o", "stages": ["sft", "rl"]}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"distribution": "log_unifrom", "min": 1, "max": 2},
            "unknown distribution 'log_unifrom'; did you mean",
        ),
        ({"distribution": "beta"}, "unknown distribution 'beta'; "),
        ({"values": []}, r"values must be a list of values to try, got \[\]"),
        ({"values": "h2o"}, "values must be a list of values to try, got 'h2o'"),
        ({"values": [1, 1]}, "values list 1 twice"),
        ({"values": [1, None]}, "null reaches the command as the text None; write 'null'"),
        ({"value": None}, "null reaches the command as the text None"),
        ({"values": [1, 2], "probabilities": [1]}, "a number of at least 0 for each of 2 values"),
        ({"values": [1], "probabilities": [-1]}, "a number of at least 0 for each of 1 values"),
        ({"values": [1], "min": 1}, "unexpected min; it takes values"),
        ({"min": 2, "max": 1}, r"min must be below max=1, got 2"),
        ({"min": 1}, "must say what to try, got {'min': 1}"),
        ({}, "must say what to try"),
        (
            {"distribution": "uniform", "min": "1e-5", "max": 1},
            "min must be a number, got 1e-5 .*YAML reads '1e-5' as a text",
        ),
        ({"distribution": "log_uniform_values", "min": 0, "max": 1}, "min must be above 0, got 0"),
        (
            {"distribution": "int_uniform", "min": 0.5, "max": 2},
            "min must be a whole number, got 0.5 .*use uniform",
        ),
        ({"distribution": "q_uniform", "min": 0, "max": 1, "q": 0}, "q must be a number above 0, got 0"),
        ({"distribution": "uniform", "min": 0, "max": 1, "q": 2}, "unknown key .*q.; it takes min, max"),
        ({"distribution": "normal", "sigma": 0}, "sigma must be a number above 0, got 0"),
        ({"distribution": "uniform", "min": 0.0}, "max is missing"),
    ],
)
def test_a_mistake_is_named_with_its_parameter(options, says):
    with pytest.raises(ConfigError, match=says) as caught:
        parse_parameters({"optimizer": {"parameters": {"lr": options}}})
    assert "parameters.optimizer.lr" in str(caught.value)


def test_every_distribution_has_corners_that_it_can_draw():
    needs = {
        "categorical": {"values": [1, 2]},
        "categorical_w_probabilities": {"values": [1, 2], "probabilities": [1, 1]},
        "int_uniform": {"min": 1, "max": 2},
    }
    for kind in (*LISTED, *NUMERIC):
        limits = {} if "normal" in kind else {"min": 1, "max": 2}
        varied, _ = parse_parameters({"x": {"distribution": kind, **needs.get(kind, limits)}})
        (found,) = varied
        assert len({str(found.value(corner)) for corner in found.corners()}) == 2, kind


def test_a_grid_is_every_combination_the_first_parameter_slowest(tmp_path):
    plan = plan_of(tmp_path, GRID)
    values = plan.combinations()
    assert [(value["seed"], value["cache.budget"]) for value in values] == [
        (0, 12),
        (0, 16),
        (1, 12),
        (1, 16),
    ]
    assert n_runs(plan.sweep) == 4
    assert n_runs(plan.sweep, max_runs=3) == 3
    assert n_runs(plan.sweep, max_runs=30) == 4


def test_a_search_is_checked_at_its_corners(tmp_path):
    plan = plan_of(tmp_path, BAYES)
    corners = plan.combinations()
    assert [(corner["optimizer.lr"], corner["experiment"]) for corner in corners] == [
        (1e-5, "naive"), (1e-5, "smd"), (0.1, "naive"), (0.1, "smd"),
    ]  # fmt: skip


def test_too_many_corners_are_checked_a_parameter_at_a_time(tmp_path):
    many = {f"p{i}": {"min": 0.0, "max": 1.0} for i in range(8)}
    sweep = plan_of(tmp_path, BAYES | {"parameters": many}).sweep
    drawn = list(combinations(sweep.parameters, sweep.method))
    assert len(drawn) == 9  # all low, then each alone high, in place of 2^8
    assert {sum(draw.values()) for draw in drawn} == {0.0, 1.0}


def test_a_search_without_a_bound_is_refused(tmp_path):
    endless = {name: value for name, value in BAYES.items() if name != "run_cap"}
    plan = plan_of(tmp_path, endless)
    with pytest.raises(ConfigError, match="never ends by itself; give run_cap in the file, or --max-runs"):
        n_runs(plan.sweep)
    assert n_runs(plan.sweep, max_runs=5) == 5
