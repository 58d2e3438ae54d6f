"""Figures of an evaluation: accuracy at each budget, calibration of the reward head."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from lit_rlkv.evaluation.reward_model import N_BINS
from lit_rlkv.reporting.plots.style import BLUE, MUTED, SAND, empty_figure, legend, single_axes
from lit_rlkv.types import EvalRow


def accuracy_against_budget(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> Figure:
    """Draw the accuracy at each cache budget; a dashed line is the same model with a dense cache."""
    figure, axes = single_axes("Budget (keys per sequence, layer and KV head)", "Accuracy")
    if not before and not after:
        return empty_figure(figure, axes, "no evaluation was run")
    budgets = sorted({row.budget for row in (*before, *after) if row.budget is not None})
    is_single = not before or not after
    for rows, name, color, marker in ((before, "before", MUTED, "s"), (after, "after", BLUE, "o")):
        label, dense_label = ("under the budget", "dense") if is_single else (name, f"dense, {name}")
        sparse = sorted((row.budget, row.accuracy) for row in rows if row.budget is not None)
        if sparse:
            axes.plot(*zip(*sparse, strict=True), color=color, marker=marker, ms=5, lw=1.8, label=label)
        for row in rows:
            if row.budget is None:
                axes.axhline(row.accuracy, color=color, lw=1.2, ls=(0, (5, 3)), label=dense_label, zorder=1.5)
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_minor_locator(NullLocator())
    if budgets:
        axes.set_xscale("log", base=2)
        axes.set_xlim(budgets[0] / 1.15, budgets[-1] * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    legend(axes)
    return figure


def reliability(confidence: Sequence[float], accuracy: Sequence[float], counts: Sequence[int]) -> Figure:
    """Draw the accuracy of a reward head against its confidence; a calibrated head lies on the diagonal.

    Args:
        confidence: mean P(first is better) of each non-empty bin, in ascending order.
        accuracy: share of comparisons in which the first is better, of each bin.
        counts: comparisons in each bin; bars show their shares.
    """
    figure, axes = single_axes("Predicted: the first is better", "Observed")
    if not counts:
        return empty_figure(figure, axes, "no pairs were scored")
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
