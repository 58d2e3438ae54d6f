import pytest

from lit_rlkv.diagnostics.arms import ARMS
from lit_rlkv.reporting import plots
from tests.reporting.plots.drawn import labels, line
from tests.reporting.plots.measurements import arm_history


def test_sample_sizes_stand_where_they_were_measured():
    figure = plots.effective_samples(arm_history(0.5, None, 0.05))
    assert list(line(figure, "tis").get_xdata()) == [1, 3]
    assert list(line(figure, "tis").get_ydata()) == [0.5, 0.05]
    assert figure.axes[0].get_ylim() == pytest.approx((0.01, 1.3))


def test_every_arm_that_is_measured_is_drawn():
    row = {"iteration": 1} | {f"kv/arms/{arm}/ess": 0.5 for arm in ARMS}
    figure = plots.effective_samples([{**row, "kv/arms/mis/rejected": 0.2, "kv/arms/tis/clipped": 0.1}])
    assert len(labels(figure)) == len(ARMS)
    shares = {found.get_label(): found.get_ydata()[0] for found in figure.axes[1].lines}
    assert shares == {"tis clips": 0.1, "mis rejects": 0.2}


def test_an_arm_that_keeps_no_sample_at_all_is_left_out_of_a_log_axis():
    figure = plots.effective_samples(arm_history(0.5, 0.0))
    assert figure.axes[0].get_ylim()[0] == pytest.approx(0.1)
