import numpy as np
import pytest

from lit_rlkv.diagnostics.importance_ratios import CORRECTION_WEIGHTS
from lit_rlkv.reporting.plots import curves, style
from tests.reporting.plots.drawn import arm_history, eval_row, labels, line, rewards


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
    kl, _ = curves.MISMATCHES["rollout_corr/kl"]
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
    history = [{**row, "kv/arms/mis/rejected": 0.2, "kv/arms/tis/clipped": 0.1}]
    assert len(labels(curves.effective_samples(history))) == len(CORRECTION_WEIGHTS)
    shares = {
        found.get_label(): found.get_ydata()[0] for found in curves.rejected_tokens(history).axes[0].lines
    }
    assert shares == {"tis clips": 0.1, "mis rejects": 0.2}


def test_a_correction_that_keeps_no_sample_is_left_out_of_a_log_axis():
    figure = curves.effective_samples(arm_history(0.5, 0.0))
    assert figure.axes[0].get_ylim()[0] == pytest.approx(0.1)


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
    rows = [eval_row("dense", None, 1.0), eval_row("h2o 8", 8, 0.5)]  # of 100 problems
    axes = curves.accuracy_against_budget([], rows).axes[0]
    (whiskers,) = axes.collections[0].get_paths()
    # 0.5 of 100: the Wilson interval is 0.5 ± 0.0962
    assert whiskers.vertices[:, 1] == pytest.approx([0.4038, 0.5962], abs=1e-4)
    (band,) = axes.patches
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((0.9630, 1.0), abs=1e-4)


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
    axes = curves.reliability([0.04, 0.5, 0.97], [0.0, 0.25, 1.0], [6, 4, 10]).axes[0]
    diagonal, head = axes.lines
    assert list(head.get_xdata()) == [0.04, 0.5, 0.97]
    assert list(head.get_ydata()) == [0.0, 0.25, 1.0]
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [0, 1]
    assert [bar.get_height() for bar in axes.patches] == [0.3, 0.2, 0.5]


def test_reliability_bars_stand_in_their_bins():
    # A mean confidence of 1 - 1e-17 is 1 in floating point, and still of the bin from 0.9 to 1.
    bars = curves.reliability([0.09, 0.11, 1.0], [0.0, 0.5, 1.0], [1, 1, 1]).axes[0].patches
    centres = [bar.get_x() + bar.get_width() / 2 for bar in bars]
    assert centres == pytest.approx([0.05, 0.15, 0.95])


MIB = 2**20


def row(iteration, **others):
    times = {"time/rollout": 3.0, "time/score": 1.0, "time/reward": 0.5, "time/update": 2.0}
    return {"iteration": iteration, **times, **others}


def phases(history):
    """Return the values and the baseline of each phase."""
    return {
        patch.get_label(): (patch.get_data().values, patch.get_data().baseline)
        for patch in curves.time_per_phase(history).axes[0].patches
    }


def test_phases_stand_on_one_another_and_diagnostics_on_top():
    history = [row(1, **{"time/diagnostics/cache": 0.25, "time/diagnostics/mismatch": 0.5}), row(2)]
    found = phases(history)
    assert list(found) == ["rollout", "score", "reward", "update", "diagnostics"]
    tops, bottoms = found["update"]
    assert (list(bottoms), list(tops)) == ([4.5, 4.5], [6.5, 6.5])
    assert list(found["diagnostics"][0]) == [7.25, 6.5]


def test_an_iteration_without_the_measurement_is_a_gap():
    tops, _ = phases([row(1), {"iteration": 2, "time/update": 2.0}, row(3)])["rollout"]
    np.testing.assert_array_equal(tops, [3.0, np.nan, 3.0])


@pytest.mark.parametrize(
    ("kind", "label"), [("peak", "MiB allocated at most"), ("resident_peak", "MiB resident at most")]
)
def test_peaks_are_drawn_in_mebibytes_and_named_for_what_they_are(kind, label):
    history = [
        row(i, **{f"memory/rollout/{kind}": 4.0 * MIB, f"memory/update/{kind}": i * MIB}) for i in (1, 2)
    ]
    axes = curves.memory_per_phase(history).axes[0]
    assert axes.get_ylabel() == label
    assert {line.get_label(): list(line.get_ydata()) for line in axes.lines} == {
        "rollout": [4.0, 4.0],
        "update": [1.0, 2.0],
    }


def test_stages_are_bars_of_their_seconds():
    axes = curves.time_per_stage({"sft": 95.0, "rl": 12.5}).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [95.0, 12.5]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["sft", "rl"]
