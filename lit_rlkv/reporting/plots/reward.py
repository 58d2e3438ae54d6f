"""Pictures of a learned reward: whether the verifier follows it, and how sure it should be."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lit_rlkv.evaluation.reward_model import N_BINS
from lit_rlkv.reporting.plots.history import History, series, trailing_mean
from lit_rlkv.reporting.plots.style import (
    BLUE,
    MUTED,
    NORMAL,
    SAND,
    SMALL,
    VERMILLION,
    legend,
    nothing,
    single,
)


def proxy_and_gold(history: History) -> Figure:
    """The verifier's score of the rollouts on the left axis, what the reward model thinks on the right."""
    figure, axes = single("Iteration", "Verifier's score (gold)")
    learned_at, learned = series(history, "rewards/learned")
    gold_at, gold = series(history, "rewards/exact_match")
    if len(learned) == 0:
        return nothing(figure, axes, "no reward model was asked")
    right = axes.twinx()
    right.set_ylabel("Learned reward (proxy)", color=VERMILLION, size=NORMAL)
    right.tick_params(colors=VERMILLION, labelsize=SMALL, length=0)
    right.spines[:].set_visible(False)
    for at, value, side, color, name in (
        (gold_at, gold, axes, BLUE, "gold, left axis"),
        (learned_at, learned, right, VERMILLION, ""),
    ):
        if len(value):
            side.plot(at, value, color=color, lw=0.8, alpha=0.4)
            side.plot(at, trailing_mean(value), color=color, lw=2, label=name or None)
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.plot([], [], color=VERMILLION, lw=2, label="proxy, right axis")  # for the legend
    legend(axes)
    return figure


def reliability(confidence: Sequence[float], accuracy: Sequence[float], counts: Sequence[int]) -> Figure:
    """How often a reward head that is so sure is right, in each bin; on the diagonal it knows its own limits.

    Args:
        confidence: mean P(first is better) of each bin that holds any comparisons, in ascending order.
        accuracy: how often the first was the better one.
        counts: comparisons; the bars are their shares.
    """
    figure, axes = single("Predicted: the first is better", "Observed")
    if not counts:
        return nothing(figure, axes, "no pairs were scored")
    share = np.array(counts) / np.sum(counts)
    place = np.minimum(np.floor(np.array(confidence) * N_BINS), N_BINS - 1)
    axes.bar((place + 0.5) / N_BINS, share, width=0.9 / N_BINS, color=SAND, label="share of comparisons")
    axes.plot([0, 1], [0, 1], color=MUTED, lw=1.2, ls=(0, (5, 3)), label="calibrated")
    axes.plot(confidence, accuracy, color=BLUE, marker="o", ms=5, lw=1.8, label="reward head")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(-0.03, 1.03)
    legend(axes)
    return figure
