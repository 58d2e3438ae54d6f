"""Which figures a report and a comparison have."""

from dataclasses import replace

import pytest

from lit_rlkv.reporting.pictures import comparison_figures, figures
from lit_rlkv.reporting.plots import curves, style
from tests.reporting.plots.drawn import POSITIONS, layers
from tests.reporting.reports import EMPTY, FULL

BY_POSITION = ["Mismatch by position", "Overlap by position", "Why reweighting explodes with length"]
LAYERS, LIFETIMES = "Which layer's eviction matters", "Key lifetimes in one sequence"
REWARD, MISMATCH, ACCURACY = "Reward", "Mismatch of sampler and learner", "Accuracy against budget"


def every_metric(section):
    """Three iterations with every metric of the curves of a section, each with values of its own."""
    names = [name for one in curves.CURVES[section] for name in one.metrics]
    return [
        {"iteration": n, **{name: (n + place) / 100 for place, name in enumerate(names)}} for n in (1, 2, 3)
    ]


EVERYTHING = replace(
    FULL,
    history=[
        {name: value for row in rows for name, value in row.items()}
        for rows in zip(
            *(every_metric(section) for section in curves.CURVES if section != "SFT"), strict=True
        )
    ],
    sft_history=every_metric("SFT"),
    diagnostics=[{**POSITIONS, "iteration": 1}, POSITIONS, layers(1, 0.3, 0.2), layers(51, 0.1, 0.4)],
)


def names(report):
    return [picture.name for picture in figures(report)]


def test_a_run_that_measured_everything_has_every_figure_and_each_can_be_drawn(caplog):
    titles = [one.title for sets in curves.CURVES.values() for one in sets]
    pictures = figures(EVERYTHING)
    assert [one.name for one in pictures] == [*titles, ACCURACY, *BY_POSITION, LAYERS, LIFETIMES]
    assert all("<path" in style.svg(one.figure, one.key) for one in pictures)
    assert all(one.caption.endswith(".") for one in pictures)
    assert [one.caption[:15] for one in pictures if one.name in BY_POSITION] == ["In iteration 7:"] * 3
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (EMPTY, []),
        (replace(FULL, history=[]), [ACCURACY, LIFETIMES]),
        (replace(FULL, evictions=None, before=[], after=[]), [REWARD, MISMATCH]),
        (replace(EMPTY, history=[{"iteration": 1, "loss": 0.5}]), ["Loss"]),
        (replace(EMPTY, sft_history=[{"iteration": 1, "lm_loss": 0.5}]), ["Loss of SFT"]),
        (replace(EMPTY, diagnostics=[layers(1, 0.1)]), [LAYERS]),
        (
            replace(EMPTY, history=[{"iteration": 1, "reward": 0.5, "rewards/exact_match": 1.0}]),
            [REWARD, "Proxy and gold"],
        ),
        (replace(EMPTY, history=[{"iteration": 1, "reward": 0.5, "rewards/exact_match": 0.5}]), [REWARD]),
    ],
)
def test_there_is_a_figure_for_what_has_data(report, expected):
    assert names(report) == expected


def test_a_figure_that_fails_is_left_out_with_a_warning(caplog):
    broken = replace(EMPTY, history=FULL.history, diagnostics=[{"name": "mismatch", "iteration": 1}])
    assert names(broken) == [REWARD, MISMATCH]
    assert "'Mismatch by position' cannot be drawn: KeyError" in caplog.text


def compared(first, second):
    return {picture.name: picture.figure.axes[0] for picture in comparison_figures({"a": first, "b": second})}


def test_a_comparison_has_the_main_metrics_of_each_figure():
    found = compared(EVERYTHING, EVERYTHING)
    assert "Accuracy of the runs against budget" in found
    assert {"Reward: mean", "Entropy", "Loss of SFT: reward head, per pair"} <= found.keys()
    shown = [name for name in found if name.startswith("Responses without")]
    assert shown == [
        f"Responses without a signal: {name}" for name in ("truncated responses", "groups of equal rewards")
    ]
    assert "Reward: std in a group" not in found
    # The first metric that was logged stands for figures of which no main metric was.
    (snr,) = compared(*[replace(EMPTY, history=[{"iteration": 1, "gradient/loss/snr": 1.0}])] * 2)
    assert snr == "Gradient signal to noise: whole policy loss"


def test_runs_share_a_figure_in_their_own_colours_also_where_one_lacks_the_metric():
    other = replace(EMPTY, history=[{"iteration": 1, "reward": 0.5, "entropy": 1.0}])
    found = compared(FULL, other)
    first, second = found["Reward: mean"].lines
    assert (list(first.get_ydata()), list(second.get_ydata())) == ([0.25, 0.75], [0.5])
    (alone,) = found["Entropy"].lines
    assert [line.get_label() for line in (first, second, alone)] == ["a", "b", "b"]
    assert [line.get_color() for line in (first, second, alone)] == [style.BLUE, *[style.VERMILLION] * 2]
    assert [line.get_linestyle() for line in (first, second)] == ["-", "--"]  # equal curves both show
