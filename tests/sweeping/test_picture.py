"""The figure of a sweep."""

import math
from pathlib import Path

import numpy as np
import pytest

from lit_rlkv.sweeping.job import Outcome
from lit_rlkv.sweeping.picture import draw_sweep, save_picture
from lit_rlkv.sweeping.plan import Run
from tests.sweeping.files import BAYES, GRID, plan_of, with_parameters


def finished(values, metric, value, state="finished"):
    return Run(0, values, Path("x")), Outcome(state, {metric: value})


def bars(axes):
    """Return name, x, mean and deviation of every line with error bars."""
    found = {}
    for container in axes.containers:
        line, _, (segments,) = container.lines
        ends = np.array(segments.get_segments())
        found[container.get_label()] = [
            (x, y, (high - low) / 2)
            for x, y, low, high in zip(
                line.get_xdata(), line.get_ydata(), ends[:, 0, 1], ends[:, 1, 1], strict=True
            )
        ]
    return found


def test_each_line_is_the_mean_and_deviation_over_seeds(tmp_path):
    content = with_parameters(
        GRID,
        seed={"values": [0, 1]},
        cache__budget={"values": [12, 16]},
        experiment={"values": ["tis", "smd"]},
    )
    ended = [
        finished(
            {"seed": seed, "cache.budget": budget, "experiment": arm}, "eval/accuracy", base + 0.1 * seed
        )
        for seed in (0, 1)
        for arm, budget, base in (("tis", 12, 0.2), ("tis", 16, 0.4), ("smd", 12, 0.6), ("smd", 16, 0.8))
    ]
    figure = draw_sweep(plan_of(tmp_path, content).sweep, ended)
    by_budget, by_arm = figure.axes
    deviation = 0.1 / math.sqrt(2)  # of two values that are 0.1 apart
    lines = bars(by_budget)
    assert list(lines) == ["tis", "smd"]
    assert np.array(lines["tis"]) == pytest.approx(np.array([(12, 0.25, deviation), (16, 0.45, deviation)]))
    assert np.array(lines["smd"])[:, 1] == pytest.approx([0.65, 0.85])
    assert [label.get_text() for label in by_arm.get_xticklabels()] == ["tis", "smd"]
    assert by_budget.get_legend().get_title().get_text() == "experiment"


def test_a_log_parameter_has_a_log_axis_and_stopped_runs_are_hollow(tmp_path):
    content = with_parameters(BAYES, optimizer__lr=BAYES["parameters"]["optimizer.lr"])
    ended = [
        finished({"optimizer.lr": 1e-3}, "reward", 0.9),
        finished({"optimizer.lr": 1e-2}, "reward", 0.1, "stopped"),
        finished({"optimizer.lr": 1e-4}, "reward", 0.2, "failed"),
    ]
    (axes,) = draw_sweep(plan_of(tmp_path, content).sweep, ended).axes
    assert axes.get_xscale() == "log"
    full, hollow = axes.collections
    assert full.get_offsets().tolist() == [[1e-3, 0.9]]
    assert hollow.get_offsets().tolist() == [[1e-2, 0.1]]
    assert len(full.get_facecolors()) == 1
    assert len(hollow.get_facecolors()) == 0


@pytest.mark.parametrize(
    ("values", "scale"), [([0.03, 0.3, 3.0], "log"), ([12, 16, 20], "linear"), ([0, 1, 50], "linear")]
)
def test_listed_numbers_that_are_far_apart_are_shown_by_ratio(tmp_path, values, scale):
    content = with_parameters(GRID, seed={"values": [0]}, distillation__weight={"values": values})
    ended = [
        finished({"seed": 0, "distillation.weight": value}, "eval/accuracy", i / 10)
        for i, value in enumerate(values)
    ]
    (axes,) = draw_sweep(plan_of(tmp_path, content).sweep, ended).axes
    assert axes.get_xscale() == scale
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(value) for value in values]


def test_runs_without_the_metric_or_with_none_that_is_finite_are_left_out(tmp_path):
    sweep = plan_of(tmp_path, GRID).sweep
    values = {"seed": 0, "cache.budget": 12}
    nothing = [finished(values, "loss", 1.0), finished(values, "eval/accuracy", math.nan)]
    assert draw_sweep(sweep, nothing) is None
    assert save_picture(tmp_path, sweep, nothing) is None
    assert (
        save_picture(tmp_path, sweep, [*nothing, finished(values, "eval/accuracy", 0.5)]).stat().st_size
        > 1000
    )
