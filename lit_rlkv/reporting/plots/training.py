"""Pictures of a training run: its reward, and how far sampler and learner are apart."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from lit_rlkv.reporting.plots.history import SMOOTHING, History, series, trailing_mean
from lit_rlkv.reporting.plots.style import BLUE, GREEN, MUTED, PURPLE, VERMILLION, legend, nothing, single

MISMATCHES = {
    "rollout_corr/kl": "KL(μ ‖ learner), k1",
    "rollout_corr/k3_kl": "KL(μ ‖ learner), k3",
    "kv/dense_k3_kl": "KL(μ ‖ dense policy), k3",
    "smd/kl": "distillation KL",
    "kv/replay_gap": "replay gap",
}
"""Metrics that the mismatch figure draws where they were logged, and their names in its legend."""


def reward_curve(history: History) -> Figure:
    """Mean reward of each iteration, its moving average, and the spread of rewards around that average."""
    figure, axes = single("Iteration", "Mean reward")
    iteration, reward = series(history, "reward")
    if len(reward) == 0:
        return nothing(figure, axes, "no reward was logged")
    smooth = trailing_mean(reward)
    spread_at, spread = series(history, "reward_std")
    if np.array_equal(spread_at, iteration):
        band = trailing_mean(spread)
        axes.fill_between(
            iteration, smooth - band, smooth + band, color=BLUE, alpha=0.13, lw=0, label="± reward std"
        )
    axes.plot(iteration, reward, color=BLUE, lw=0.8, alpha=0.5, label="each iteration")
    axes.plot(iteration, smooth, color=BLUE, lw=2, label=f"mean of the last {SMOOTHING}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes)
    return figure


def mismatch(history: History) -> Figure:
    """How far sampler and learner are apart, on a log axis.

    A negative estimate is drawn at its size with an open circle; an exact 0 leaves a gap in its line.
    """
    figure, axes = single("Iteration", "Mismatch (nats)")
    for (metric, name), color in zip(
        MISMATCHES.items(), (BLUE, GREEN, MUTED, PURPLE, VERMILLION), strict=True
    ):
        iteration, value = series(history, metric)
        if len(value) == 0:
            continue
        size = np.where(value == 0, np.nan, np.abs(value))
        label = name if np.isfinite(size).any() else f"{name}: 0 throughout"
        axes.plot(iteration, size, color=color, lw=1.4, marker="." if len(value) == 1 else None, label=label)
        is_negative = value < 0
        if is_negative.any():
            at, negative = iteration[is_negative], size[is_negative]
            axes.plot(at, negative, "o", mfc="white", mec=color, ms=4, label=f"{name}, negative")
    if not axes.lines:
        return nothing(figure, axes, "no mismatch was logged")
    shown = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    shown = shown[np.isfinite(shown)]
    if len(shown):
        axes.set_yscale("log")
        # Whole decades, so that there is a label on the axis however close the values are.
        lowest = np.floor(np.log10(0.9 * shown.min()))  # a value on a decade is not drawn on the frame
        axes.set_ylim(10**lowest, 10 ** (np.floor(np.log10(shown.max())) + 1))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes, n_columns=2)
    return figure
