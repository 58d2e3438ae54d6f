import numpy as np
import pytest

from lit_rlkv.diagnostics.importance_ratios import CORRECTION_WEIGHTS
from lit_rlkv.reporting.plots import curves, style
from tests.reporting.plots.drawn import arm_history, labels, line, rewards


def test_reward_is_averaged_over_the_last_iterations():
    figure = curves.reward_curve(rewards([0.0] * 10 + [1.0] * 5))
    smooth = line(figure, f"mean of the last {style.SMOOTHING}").get_ydata()
    assert smooth[9] == 0.0
    assert smooth[10] == pytest.approx(0.1)
    assert smooth[14] == pytest.approx(0.5)
    assert list(line(figure, "each iteration").get_ydata()) == [0.0] * 10 + [1.0] * 5
    assert len(figure.axes[0].collections) == 0


def test_reward_has_a_band_where_its_spread_was_logged():
    figure = curves.reward_curve(rewards([0.5, 0.5], reward_std=0.2))
    (band,) = figure.axes[0].collections
    height = band.get_paths()[0].vertices[:, 1]
    assert (height.min(), height.max()) == pytest.approx((0.3, 0.7))


def test_mismatch_shows_what_was_logged_on_a_log_axis():
    history = [
        {"iteration": 1, "rollout_corr/kl": 0.1, "kv/replay_gap": 0.0},
        {"iteration": 2, "rollout_corr/kl": -0.02, "kv/replay_gap": 0.0},
        {"iteration": 3, "rollout_corr/kl": 0.0, "kv/replay_gap": 0.0},
    ]
    figure = curves.mismatch(history)
    kl = curves.MISMATCHES["rollout_corr/kl"]
    assert figure.axes[0].get_yscale() == "log"
    np.testing.assert_array_equal(line(figure, kl).get_ydata(), [0.1, 0.02, np.nan])
    assert list(line(figure, f"{kl}, negative").get_xdata()) == [2]
    assert labels(figure) == [kl, f"{kl}, negative", "replay gap: 0 throughout"]


def test_a_mismatch_on_a_decade_is_not_drawn_on_the_frame():
    axes = curves.mismatch([{"iteration": 1, "kv/replay_gap": 1e-6, "rollout_corr/kl": 0.05}]).axes[0]
    assert axes.get_ylim() == pytest.approx((1e-7, 1e-1))


def test_sample_sizes_stand_where_they_were_measured():
    figure = curves.effective_samples(arm_history(0.5, None, 0.05))
    assert list(line(figure, "tis").get_xdata()) == [1, 3]
    assert list(line(figure, "tis").get_ydata()) == [0.5, 0.05]
    assert figure.axes[0].get_ylim() == pytest.approx((0.01, 1.3))


def test_every_measured_correction_is_drawn():
    row = {"iteration": 1} | {f"kv/arms/{arm}/ess": 0.5 for arm in CORRECTION_WEIGHTS}
    figure = curves.effective_samples([{**row, "kv/arms/mis/rejected": 0.2, "kv/arms/tis/clipped": 0.1}])
    assert len(labels(figure)) == len(CORRECTION_WEIGHTS)
    shares = {found.get_label(): found.get_ydata()[0] for found in figure.axes[1].lines}
    assert shares == {"tis clips": 0.1, "mis rejects": 0.2}


def test_a_correction_that_keeps_no_sample_is_left_out_of_a_log_axis():
    figure = curves.effective_samples(arm_history(0.5, 0.0))
    assert figure.axes[0].get_ylim()[0] == pytest.approx(0.1)
