import numpy as np
import pytest
from matplotlib.figure import Figure

from lit_rlkv.diagnostics.importance_ratios import CORRECTION_WEIGHTS
from lit_rlkv.reporting.plots import curves, style
from lit_rlkv.reporting.plots.curves import CurveSet, draw_metrics, draw_runs
from tests.reporting.plots.drawn import labels, line
from tests.reporting.reports import eval_row


def history(**metrics):
    """Return a history in which each metric has these values, one for each iteration."""
    length = max(map(len, metrics.values()))
    return [
        {"iteration": n + 1, **{name: values[n] for name, values in metrics.items() if n < len(values)}}
        for n in range(length)
    ]


def curves_on(axis, **metrics):
    return CurveSet("Title", "Caption.", "Unit", metrics or {"x": "x"}, axis)


def drawn(axis, values):
    return draw_metrics(curves_on(axis), history(x=values)).axes[0]


def test_the_logged_metrics_are_drawn_in_order_with_their_labels():
    found = curves_on("free", x="first", y="never logged", z="third")
    axes = draw_metrics(found, history(x=[1.0, 2.0], z=[3.0])).axes[0]
    drawn = {one.get_label(): (list(one.get_xdata()), list(one.get_ydata())) for one in axes.lines}
    assert drawn == {"first": ([1, 2], [1.0, 2.0]), "third": ([1], [3.0])}
    assert axes.get_ylabel() == "Unit"
    assert axes.get_legend() is not None


def test_a_single_curve_needs_no_legend_but_a_run_always_has_its_name():
    assert drawn("free", [1.0, 2.0]).get_legend() is None
    figure = draw_runs(curves_on("free"), "x", {"a": history(x=[1.0]), "b": history(y=[1.0])})
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a"]


def test_long_curves_have_a_thick_line_of_their_means():
    thin, thick = drawn("free", [0.0] * 20 + [1.0] * 10).lines
    assert list(thin.get_ydata()) == [0.0] * 20 + [1.0] * 10
    assert thick.get_ydata()[24] == pytest.approx(0.5)  # the mean of iterations 16 to 25
    assert thick.get_linewidth() > thin.get_linewidth()


@pytest.mark.parametrize("axis", ["share", "from zero", "percent"])
@pytest.mark.parametrize("values", [[0.2, 0.3], [0.0, 0.0]])
def test_axes_begin_where_their_unit_does(axis, values):
    low, high = drawn(axis, values).get_ylim()
    assert (low, high > max(values)) == (0, True)


def test_on_a_log_axis_zeros_are_gaps_and_only_zeros_a_remark():
    logged = history(x=[0.1, 0.0], y=[0.0, 0.0], z=[0.0, -0.1])
    axes = draw_metrics(curves_on("log", x="x", y="y", z="z"), logged).axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [0.1, np.nan])
    assert [line.get_label() for line in axes.lines] == ["x", "y: 0 throughout", "z: negative, not drawn"]


@pytest.mark.parametrize("n_iterations", [1, 2, 100])
def test_iterations_have_integer_ticks(n_iterations):
    axes = drawn("free", [0.5] * n_iterations)
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_values_are_drawn_in_the_unit_of_the_axis():
    cache = CurveSet("Cache", "", "MiB", {"kv/bytes": "cache"}, "from zero", scale=2**-20)
    figure = draw_runs(cache, "kv/bytes", {"a": history(**{"kv/bytes": [2.0**21]})})
    assert list(figure.axes[0].lines[0].get_ydata()) == [2.0]


def test_every_set_has_a_unit_and_known_metrics_to_compare_and_no_metric_is_drawn_twice():
    sets = [one for section in curves.CURVES.values() for one in section]
    assert all(one.y_label and set(one.compared) <= one.metrics.keys() for one in sets)
    names = [name for one in sets for name in one.metrics]
    assert len(set(names)) == len(names)


def test_every_correction_has_its_curve():
    drawn = [name for one in curves.CURVES["Mismatch"] for name in one.metrics if name.endswith("/ess")]
    assert drawn == [f"kv/arms/{name}/ess" for name in CORRECTION_WEIGHTS]


LEGENDS = [one for sets in curves.CURVES.values() for one in sets if len(one.metrics) > 1]


@pytest.mark.parametrize("curve", LEGENDS, ids=lambda curve: curve.title)
def test_a_legend_is_inside_its_figure_and_leaves_the_axes_their_width(curve):
    figure = curves.draw_metrics(curve, [{"iteration": 1, **dict.fromkeys([*curve.metrics][:9], 0.0)}])
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_legend().get_window_extent().x1 <= figure.bbox.x1
    assert axes.bbox.width > 0.75 * figure.bbox.width


def test_names_of_runs_are_wrapped_in_a_legend():
    names = ["runs/" + "a-long-name-of-a-run_" * 6 + str(n) for n in range(3)]
    reward = next(one for one in curves.CURVES["Training"] if one.title == "Reward")
    figure = curves.draw_runs(reward, "reward", {name: [{"iteration": 1, "reward": 0.5}] for name in names})
    figure.draw_without_rendering()
    (axes,) = figure.axes
    shown = [text.get_text().replace("\n", "") for text in axes.get_legend().get_texts()]
    assert shown == names
    assert axes.get_legend().get_window_extent().x1 <= figure.bbox.x1


def test_accuracy_is_drawn_in_the_order_of_budgets_and_dense_as_a_level():
    before = [eval_row("dense", None, 0.99), eval_row("random 16", 16, 0.46), eval_row("random 12", 12, 0.2)]
    after = [eval_row("dense", None, 0.98), eval_row("random 16", 16, 0.81)]
    figure = curves.accuracy_against_budget(before, after)
    assert list(line(figure, "before").get_xdata()) == [12, 16]
    assert list(line(figure, "before").get_ydata()) == [0.2, 0.46]
    assert list(line(figure, "after").get_ydata()) == [0.81]
    assert line(figure, "dense, before").get_ydata()[0] == 0.99
    assert line(figure, "dense, after").get_ydata()[0] == 0.98


def test_a_single_evaluation_has_no_before_and_after():
    figure = curves.accuracy_against_budget([], [eval_row("dense", None, 0.9), eval_row("h2o 8", 8, 0.5)])
    assert labels(figure) == ["under the budget", "dense"]


def test_accuracies_have_their_wilson_intervals():
    rows = [eval_row("dense", None, 1.0, 100), eval_row("h2o 8", 8, 0.5, 100)]
    axes = curves.accuracy_against_budget([], rows).axes[0]
    (whiskers,) = axes.collections[0].get_paths()
    # 0.5 of 100: the Wilson interval is 0.5 ± 0.0962
    assert whiskers.vertices[:, 1] == pytest.approx([0.4038, 0.5962], abs=1e-4)
    (band,) = axes.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((0.9630, 1.0), abs=1e-4)


def test_an_iteration_without_the_metric_is_left_out():
    history = [{"iteration": 1, "reward": 0.1}, {"iteration": 2}, {"iteration": 3, "reward": float("nan")}]
    (drawn,) = curves.draw("Reward", [*history, {"iteration": 4, "reward": 0.4}]).axes[0].lines
    assert (list(drawn.get_xdata()), list(drawn.get_ydata())) == ([1, 4], [0.1, 0.4])


def test_a_figure_becomes_an_image_of_its_size_on_white():
    figure = Figure(figsize=(2, 1))
    figure.add_axes((0, 0, 0.5, 1), facecolor="#ff0000").set_axis_on()
    image = style.pixels(figure)
    assert (image.dtype, image.shape) == (np.uint8, (style.PIXELS_PER_INCH, 2 * style.PIXELS_PER_INCH, 3))
    row = image[style.PIXELS_PER_INCH // 2]
    assert list(row[style.PIXELS_PER_INCH // 2]) == [255, 0, 0]  # the left half is red
    assert list(row[-1]) == [255, 255, 255]
