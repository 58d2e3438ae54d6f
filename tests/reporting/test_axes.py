import time

import pytest

from lit_rlkv.reporting.axes import SECONDS, TOKENS, RunAxes, place_of


def rows_of(axes, *n_tokens):
    """What the axes add to iterations that sampled so many tokens."""
    rows = []
    for iteration, n in enumerate(n_tokens, start=1):
        metrics = {"num_tokens": float(n)}
        axes.on_iteration_end(iteration, 9, metrics)
        rows.append({"iteration": float(iteration), **metrics})
    return rows


def test_tokens_add_up_and_time_runs():
    axes = RunAxes()
    axes.on_fit_start(None, None)
    rows = rows_of(axes, 100, 50, 7)
    assert [row[TOKENS] for row in rows] == [100, 150, 157]
    assert 0 < rows[0][SECONDS] < rows[1][SECONDS] < rows[2][SECONDS] < 60


def test_a_resumed_run_goes_on_and_does_not_count_the_time_it_was_down():
    before = [
        {"iteration": 1.0, TOKENS: 100.0, SECONDS: 1000.0},
        {"iteration": 2.0, TOKENS: 180.0, SECONDS: 2000.0},
    ]
    axes = RunAxes(before)
    time.sleep(0.2)  # loading and warming up are no training either
    axes.on_fit_start(None, None)
    (row,) = rows_of(axes, 20)
    assert row[TOKENS] == 200
    assert 2000 < row[SECONDS] < 2000.2


def test_a_run_begins_at_zero():
    assert place_of([]) == {"iteration": 0.0, TOKENS: 0.0, SECONDS: 0.0}


def test_the_statistics_of_the_rollout_have_to_come_first():
    with pytest.raises(KeyError, match="num_tokens"):
        RunAxes().on_iteration_end(1, 1, {})
