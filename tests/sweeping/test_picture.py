"""The figure of a sweep."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from lit_rlkv.sweeping.job import Outcome
from lit_rlkv.sweeping.picture import Scale, draw_sweep, save_picture, short_labels
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


ARMS = ["dense", "naive", "tis", "mis", "sparse_rl", "shadow", "smd"]
MODELS = [f"a-hub-organisation/A-Model-{size}B-Instruct-2507" for size in (1, 2, 4, 8, 14, 32)]
EIGHT = {
    "optimizer.lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
    "sft.on_policy_pairs.optimizer.weight_decay": {"min": 0.0, "max": 0.1},
    "cache.policy": {"values": ["random", "streaming", "h2o", "snapkv", "rkv", "tova", "knorm", "keydiff"]},
    "model.path": {"values": MODELS},
    "distillation.weight": {"values": [0.03, 0.1, 0.3, 1.0, 3.0]},
    "rollout.n_prompts": {"values": [8, 15, 16, 17, 18, 1000]},
    "evaluation.budgets": {"values": [f"[{n}]" for n in range(16)]},
    "experiment": {"values": ARMS},
}


def drawn(values):
    """Return one value of a parameter of EIGHT."""

    def draw(generator):
        if "values" in values:
            return values["values"][generator.integers(len(values["values"]))]
        return float(generator.uniform(values["min"], values["max"]))

    return draw


def texts(figure):
    """Return the texts of a figure that are drawn, with their boxes."""
    figure.draw_without_rendering()
    found = [figure._suptitle]
    for axes in figure.axes:
        legend = axes.get_legend()
        if axes.axison:
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())
                ticks = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
                found += [axis.label, *ticks]
            found += [*legend.get_texts(), legend.get_title()] if legend else []
    shown = [text for text in found if text.get_visible() and text.get_text()]
    return [(text, text.get_window_extent()) for text in shown]


def collisions(figure):
    """Return texts that touch each other or leave the figure; slanted ones are judged by their distance."""
    boxes = texts(figure)
    out = [text.get_text() for text, box in boxes if box.x0 < 0 or box.y0 < 0]
    out += [text.get_text() for text, box in boxes if box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1]
    for (one, box), (other, other_box) in itertools.combinations(boxes, 2):
        angle = math.radians(one.get_rotation())
        if angle and one.get_rotation() == other.get_rotation() and one.axes is other.axes:
            apart = abs(box.x1 - other_box.x1) * math.sin(angle)
            is_touching = 0 < apart < one.get_fontsize() * figure.dpi / 72
        else:
            is_touching = box.overlaps(other_box)
        if is_touching:
            out.append((one.get_text(), other.get_text()))
    return out


def outcomes(parameters, n, states, seed=0):
    generator = np.random.default_rng(seed)
    draws = {name: drawn(node) for name, node in parameters.items()}
    return [
        finished(
            {name: draw(generator) for name, draw in draws.items()},
            "eval/accuracy",
            generator.uniform(),
            states[i % len(states)],
        )
        for i in range(n)
    ]


SWEEPS = {
    "few runs": ({"cache.budget": {"values": [12, 14, 16]}, "experiment": {"values": ARMS}}, 2, ["finished"]),
    "two listed": (
        {"cache.budget": {"values": [12, 14, 16]}, "experiment": {"values": ARMS}},
        60,
        ["finished"],
    ),
    "long names": ({"model.path": {"values": MODELS}, "experiment": {"values": ARMS}}, 60, ["finished"]),
    "one range": ({"optimizer.lr": EIGHT["optimizer.lr"]}, 20, ["finished", "stopped", "failed"]),
    "close numbers": ({"rollout.n_prompts": EIGHT["rollout.n_prompts"]}, 20, ["finished"]),
    "eight": (EIGHT, 60, ["finished", "stopped", "failed"]),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_no_text_touches_another_or_leaves_the_figure(tmp_path, name):
    parameters, n, states = SWEEPS[name]
    content = with_parameters(BAYES | {"name": name, "metric": GRID["metric"]}, **parameters)
    figure = draw_sweep(plan_of(tmp_path, content).sweep, outcomes(parameters, n, states))
    assert collisions(figure) == []


def test_a_label_that_is_too_long_is_seen_to_touch(tmp_path):
    parameters, n, states = SWEEPS["two listed"]
    content = with_parameters(BAYES | {"metric": GRID["metric"]}, **parameters)
    figure = draw_sweep(plan_of(tmp_path, content).sweep, outcomes(parameters, n, states))
    figure.axes[1].set_xticks(range(7), [f"an arm of a long name {n}" for n in range(7)])
    assert collisions(figure)


def test_short_labels_of_long_values_still_tell_them_apart():
    assert short_labels(["tis", "smd"]) == {"tis": "tis", "smd": "smd"}
    short = list(short_labels(MODELS).values())
    assert short[0] == "…del-1B-In…"
    assert len(set(short)) == len(MODELS)
    names = [f"{'a' * 30}{n}{'b' * 30}{n}" for n in range(3)]
    assert len(set(short_labels(names).values())) == 3


def test_only_what_ran_has_a_place_and_the_title_counts_the_rest(tmp_path):
    parameters = {
        "cache.budget": {"values": [12, 14, 16]},
        "experiment": {"values": ARMS},
        "seed": {"values": [0]},
    }
    content = with_parameters(GRID | {"name": "arms"}, **parameters)
    values = {"seed": 0, "cache.budget": 12}
    ended = [
        finished(values | {"experiment": "tis"}, "eval/accuracy", 0.5),
        finished(values | {"experiment": "smd"}, "eval/accuracy", 0.7, "stopped"),
        finished(values | {"experiment": "mis"}, "eval/accuracy", 0.6, "failed"),
        finished(values | {"experiment": "naive"}, "loss", 0.6),
    ]
    figure = draw_sweep(plan_of(tmp_path, content).sweep, ended)
    (axes,) = figure.axes  # one budget ran, so it is no parameter of the figure
    assert [label.get_text() for label in axes.get_xticklabels()] == ["tis", "smd"]
    assert axes.get_legend() is None
    assert figure.get_suptitle().splitlines()[:2] == [
        "arms",
        "runs: 1 finished, 1 stopped early (hollow), 1 failed (not drawn), 1 without the metric (not drawn)",
    ]


def test_lines_are_those_of_values_that_ran(tmp_path):
    parameters = {
        "cache.budget": {"values": [12, 14]},
        "experiment": {"values": ARMS},
        "seed": {"values": [0]},
    }
    ended = [
        finished({"seed": 0, "cache.budget": budget, "experiment": arm}, "eval/accuracy", 0.5)
        for budget in (12, 14)
        for arm in ("tis", "smd")
    ]
    figure = draw_sweep(plan_of(tmp_path, with_parameters(GRID, **parameters)).sweep, ended)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["tis", "smd"]


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


def test_values_that_are_equal_as_numbers_stand_side_by_side():
    assert Scale.of(["1", "1.0"]) == Scale.side_by_side(["1", "1.0"])
    assert Scale.of(["1", "2"]).is_numeric
