import numpy as np
import pytest

from lit_rlkv.reporting import plots
from tests.reporting.plots.drawn import labels, line, rewards


def test_reward_is_averaged_over_the_last_iterations():
    figure = plots.reward_curve(rewards([0.0] * 10 + [1.0] * 5))
    smooth = line(figure, f"mean of the last {plots.SMOOTHING}").get_ydata()
    assert smooth[9] == 0.0
    assert smooth[10] == pytest.approx(0.1)
    assert smooth[14] == pytest.approx(0.5)
    assert list(line(figure, "each iteration").get_ydata()) == [0.0] * 10 + [1.0] * 5
    assert len(figure.axes[0].collections) == 0


def test_reward_has_a_band_where_its_spread_was_logged():
    figure = plots.reward_curve(rewards([0.5, 0.5], reward_std=0.2))
    (band,) = figure.axes[0].collections
    height = band.get_paths()[0].vertices[:, 1]
    assert (height.min(), height.max()) == pytest.approx((0.3, 0.7))


def test_mismatch_shows_what_was_logged_on_a_log_axis():
    history = [
        {"iteration": 1, "rollout_corr/kl": 0.1, "kv/replay_gap": 0.0},
        {"iteration": 2, "rollout_corr/kl": -0.02, "kv/replay_gap": 0.0},
        {"iteration": 3, "rollout_corr/kl": 0.0, "kv/replay_gap": 0.0},
    ]
    figure = plots.mismatch(history)
    kl = plots.MISMATCHES["rollout_corr/kl"]
    assert figure.axes[0].get_yscale() == "log"
    np.testing.assert_array_equal(line(figure, kl).get_ydata(), [0.1, 0.02, np.nan])
    assert list(line(figure, f"{kl}, negative").get_xdata()) == [2]
    assert labels(figure) == [kl, f"{kl}, negative", "replay gap: 0 throughout"]


def test_a_mismatch_on_a_decade_is_not_drawn_on_the_frame():
    axes = plots.mismatch([{"iteration": 1, "kv/replay_gap": 1e-6, "rollout_corr/kl": 0.05}]).axes[0]
    assert axes.get_ylim() == pytest.approx((1e-7, 1e-1))
