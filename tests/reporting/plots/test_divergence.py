import numpy as np

from lit_rlkv.reporting.plots import divergence
from tests.reporting.plots.drawn import POSITIONS, labels, layers, line

NAN = np.nan


def test_mismatch_is_drawn_by_position_without_what_is_rounding():
    figure = divergence.mismatch_by_position(POSITIONS)
    assert figure.axes[0].get_yscale() == "log"
    assert list(line(figure, "KL, mean").get_xdata()) == [0, 1, 2, 3]
    np.testing.assert_array_equal(line(figure, "KL, mean").get_ydata(), [NAN, 0.01, 0.2, 1.5])
    tail = line(figure, "|log ρ|, 99th percentile").get_ydata()
    np.testing.assert_array_equal(tail, [NAN, 0.5, 8.0, 30.0])
    # From the first position, also of those without a dot, and over no decade without any.
    assert figure.axes[0].get_xlim()[0] == 0
    assert figure.axes[0].get_ylim()[0] > 1e-3


def test_a_rollout_without_mismatch_has_a_picture_too():
    nothing = [0.0] * 4
    silent = {**POSITIONS, "k3": nothing, "abs_log_ratio_p95": nothing, "abs_log_ratio_p99": nothing}
    low, high = divergence.mismatch_by_position(silent).axes[0].get_ylim()
    assert low < high


def test_overlap_is_drawn_where_it_was_looked_at():
    figure = divergence.overlap_by_position(POSITIONS)
    np.testing.assert_array_equal(line(figure, "mean").get_ydata(), [1.0, 0.9, 0.8, NAN])
    np.testing.assert_array_equal(line(figure, "5th percentile").get_ydata(), [1.0, 0.4, 0.05, NAN])


def test_weights_show_sample_size_and_the_log_of_the_product():
    figure = divergence.weights_by_position(POSITIONS)
    left, right = figure.axes
    assert list(left.lines[0].get_ydata()) == [1.0, 0.9, 0.05, 0.002]
    assert [list(found.get_ydata()) for found in right.lines] == [[0.0, 0.1, 0.5, 0.9], [0.0, 0.3, 2.0, 4.0]]
    assert labels(figure) == ["sample size, left axis", "|log Π ρ|, mean", "95th percentile"]


def test_positions_that_few_responses_reach_are_shaded():
    (shade,) = divergence.overlap_by_position(POSITIONS).axes[0].patches
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == (2.5, 3.5)  # 2 of 100 get to the last one
    everyone = {**POSITIONS, "n_response_tokens": [100] * 4}
    assert len(divergence.overlap_by_position(everyone).axes[0].patches) == 0


def test_layers_are_bars_of_the_last_measurement_beside_the_first():
    figure = divergence.layer_mismatch(layers(1, 0.3, 0.2), layers(51, 0.1, 0.4))
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0.1, 0.4]
    assert list(line(figure, "iteration 1").get_ydata()) == [0.3, 0.2]
    assert line(figure, "all layers evict").get_ydata()[0] == 0.5
