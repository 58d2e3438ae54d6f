"""Which combinations a sweep is made of."""

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.grid import combinations, n_runs
from tests.sweeping.files import BAYES, GRID, plan_of


def test_a_grid_is_every_combination_the_first_parameter_slowest(tmp_path):
    plan = plan_of(tmp_path, GRID)
    values = [plan.values(drawn) for drawn in combinations(plan.sweep)]
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
    corners = [plan.values(drawn) for drawn in combinations(plan.sweep)]
    assert [(corner["optimizer.lr"], corner["experiment"]) for corner in corners] == [
        (1e-5, "naive"), (1e-5, "smd"), (0.1, "naive"), (0.1, "smd"),
    ]  # fmt: skip


def test_too_many_corners_are_checked_a_parameter_at_a_time(tmp_path):
    many = {f"p{i}": {"min": 0.0, "max": 1.0} for i in range(8)}
    drawn = list(combinations(plan_of(tmp_path, BAYES | {"parameters": many}).sweep))
    assert len(drawn) == 9  # all low, then each alone high, in place of 2^8
    assert {sum(draw.values()) for draw in drawn} == {0.0, 1.0}


def test_a_search_without_a_bound_is_refused(tmp_path):
    endless = {name: value for name, value in BAYES.items() if name != "run_cap"}
    plan = plan_of(tmp_path, endless)
    with pytest.raises(ConfigError, match="never ends by itself; give run_cap in the file, or --max-runs"):
        n_runs(plan.sweep)
    assert n_runs(plan.sweep, max_runs=5) == 5
