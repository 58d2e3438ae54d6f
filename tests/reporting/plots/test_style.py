import numpy as np
from matplotlib.figure import Figure

from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.plots.style import PIXELS_PER_INCH, pixels


def test_an_iteration_without_the_metric_is_left_out():
    history = [{"iteration": 1, "reward": 0.1}, {"iteration": 2}, {"iteration": 3, "reward": float("nan")}]
    iteration, value = style.series([*history, {"iteration": 4, "reward": 0.4}], "reward")
    assert list(iteration) == [1, 4]
    assert list(value) == [0.1, 0.4]


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
