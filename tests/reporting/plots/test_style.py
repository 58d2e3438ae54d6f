import numpy as np
import pytest
from matplotlib.figure import Figure

from lit_rlkv.reporting.plots import curves, style
from lit_rlkv.reporting.plots.style import PIXELS_PER_INCH, pixels


def test_an_iteration_without_the_metric_is_left_out():
    history = [{"iteration": 1, "reward": 0.1}, {"iteration": 2}, {"iteration": 3, "reward": float("nan")}]
    iteration, value = style.series([*history, {"iteration": 4, "reward": 0.4}], "reward")
    assert list(iteration) == [1, 4]
    assert list(value) == [0.1, 0.4]


LOG = [one for sets in curves.CURVES.values() for one in sets if len(one.metrics) > 1]


@pytest.mark.parametrize("curve", LOG, ids=lambda curve: curve.title)
@pytest.mark.parametrize("n", [2, 3, 9])
def test_a_legend_is_inside_its_figure_and_leaves_the_axes_their_width(curve, n):
    figure = curves.draw_metrics(curve, [{"iteration": 1, **dict.fromkeys([*curve.metrics][:n], 0.0)}])
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


def painted(color):
    figure = Figure(figsize=(2, 1))
    figure.add_axes((0, 0, 0.5, 1), facecolor=color).set_axis_on()
    return pixels(figure)


def test_a_figure_becomes_an_image_of_its_size_on_white():
    image = painted("#ff0000")
    assert image.dtype == np.uint8
    assert image.shape == (PIXELS_PER_INCH, 2 * PIXELS_PER_INCH, 3)
    row = image[PIXELS_PER_INCH // 2]
    assert list(row[PIXELS_PER_INCH // 2]) == [255, 0, 0]  # the left half is red
    assert list(row[-1]) == [255, 255, 255]
