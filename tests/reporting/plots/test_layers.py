from lit_rlkv.reporting import plots
from tests.reporting.plots.drawn import line
from tests.reporting.plots.measurements import layers


def test_layers_are_bars_of_the_last_measurement_beside_the_first():
    figure = plots.layer_mismatch(layers(1, 0.3, 0.2), layers(51, 0.1, 0.4))
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0.1, 0.4]
    assert list(line(figure, "iteration 1").get_ydata()) == [0.3, 0.2]
    assert line(figure, "all layers evict").get_ydata()[0] == 0.5


def test_a_single_measurement_is_not_compared_with_itself():
    only = layers(1, 0.3, 0.2)
    names = [found.get_label() for found in plots.layer_mismatch(only, only).axes[0].lines]
    assert names == ["all layers evict"]
