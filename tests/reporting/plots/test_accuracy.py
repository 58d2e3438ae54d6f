import pytest

from lit_rlkv.reporting.plots import accuracy, curves
from tests.reporting.plots.drawn import eval_row, labels, line


def test_accuracy_is_drawn_in_the_order_of_budgets_and_dense_as_a_level():
    before = [eval_row("dense", None, 0.99), eval_row("random 16", 16, 0.46), eval_row("random 12", 12, 0.2)]
    after = [eval_row("dense", None, 0.98), eval_row("random 16", 16, 0.81)]
    figure = accuracy.accuracy_against_budget(before, after)
    assert list(line(figure, "before").get_xdata()) == [12, 16]
    assert list(line(figure, "before").get_ydata()) == [0.2, 0.46]
    assert list(line(figure, "after").get_ydata()) == [0.81]
    assert line(figure, "dense, before").get_ydata()[0] == 0.99
    assert line(figure, "dense, after").get_ydata()[0] == 0.98


def test_a_single_evaluation_has_no_before_and_after():
    figure = accuracy.accuracy_against_budget([], [eval_row("dense", None, 0.9), eval_row("h2o 8", 8, 0.5)])
    assert labels(figure) == ["under the budget", "dense"]


def test_proxy_and_gold_share_their_iterations_on_axes_of_their_own():
    history = [
        {"iteration": index + 1, "rewards/learned": float(index), "rewards/exact_match": 0.5}
        for index in range(4)
    ]
    figure = curves.proxy_and_gold(history)
    gold, proxy = figure.axes
    assert list(gold.lines[0].get_ydata()) == [0.5] * 4
    assert list(proxy.lines[0].get_ydata()) == [0.0, 1.0, 2.0, 3.0]
    assert list(proxy.lines[1].get_ydata()) == [0.0, 0.5, 1.0, 1.5]  # the mean so far
    assert list(proxy.lines[0].get_xdata()) == list(gold.lines[0].get_xdata()) == [1, 2, 3, 4]
    assert labels(figure) == ["gold, left axis", "proxy, right axis"]


def test_preferences_without_a_verifier_have_a_proxy_only():
    figure = curves.proxy_and_gold([{"iteration": 1, "rewards/learned": 2.0}])
    assert list(figure.axes[1].lines[0].get_ydata()) == [2.0]
    assert labels(figure) == ["proxy, right axis"]


def test_reliability_draws_what_was_observed_against_what_was_predicted():
    axes = accuracy.reliability([0.04, 0.5, 0.97], [0.0, 0.25, 1.0], [6, 4, 10]).axes[0]
    diagonal, head = axes.lines
    assert list(head.get_xdata()) == [0.04, 0.5, 0.97]
    assert list(head.get_ydata()) == [0.0, 0.25, 1.0]
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [0, 1]
    assert [bar.get_height() for bar in axes.patches] == [0.3, 0.2, 0.5]


def test_reliability_bars_stand_in_their_bins():
    # A mean confidence of 1 - 1e-17 is 1 in floating point, and still of the bin from 0.9 to 1.
    bars = accuracy.reliability([0.09, 0.11, 1.0], [0.0, 0.5, 1.0], [1, 1, 1]).axes[0].patches
    centres = [bar.get_x() + bar.get_width() / 2 for bar in bars]
    assert centres == pytest.approx([0.05, 0.15, 0.95])
