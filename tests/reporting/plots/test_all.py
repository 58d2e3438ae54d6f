"""Tests of every figure."""

import pytest
from matplotlib.figure import Figure

from lit_rlkv.reporting.plots import accuracy, curves, divergence, kept_keys, time_and_memory
from tests.reporting.plots.drawn import NOTHING, TWO_HEADS, rewards


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (lambda: curves.reward_curve([]), "no reward was logged"),
        (lambda: curves.mismatch([{"iteration": 1, "reward": 0.5}]), "no mismatch was logged"),
        (lambda: accuracy.accuracy_against_budget([], []), "no evaluation was run"),
        (lambda: time_and_memory.time_per_stage({}), "no stage was timed"),
        (lambda: curves.proxy_and_gold(rewards([0.5])), "no learned reward was logged"),
        (lambda: accuracy.reliability([], [], []), "no pairs were scored"),
        (lambda: kept_keys.cache_fill(NOTHING), "the rollout is empty"),
        (lambda: divergence.mismatch_by_position(None), "no mismatch was measured"),
        (lambda: divergence.overlap_by_position(None), "no overlap was measured"),
        (lambda: divergence.weights_by_position(None), "no weights were measured"),
        (lambda: divergence.layer_mismatch(None, None), "no layer was measured"),
        (lambda: curves.effective_samples([]), "no correction was measured"),
    ],
)
def test_a_figure_without_data_says_so(draw, reason):
    figure = draw()
    assert isinstance(figure, Figure)
    assert [text.get_text() for text in figure.axes[0].texts] == [reason]


@pytest.mark.parametrize(
    "draw", [lambda: kept_keys.cache_fill(TWO_HEADS), lambda: kept_keys.key_lifetimes(NOTHING, 0)]
)
def test_figures_render(draw, tmp_path):
    draw().savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
