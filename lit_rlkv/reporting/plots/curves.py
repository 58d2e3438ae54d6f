"""Figures of metrics over iterations: reward, mismatch, corrections, learned reward."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

from lit_rlkv.reporting.plots.style import (
    BLUE,
    FULL_WIDTH,
    GREEN,
    HEIGHT,
    INK,
    MUTED,
    NORMAL,
    PURPLE,
    SMOOTHING,
    VERMILLION,
    History,
    empty_figure,
    legend,
    right_axis,
    series,
    single_axes,
    style_axes,
    trailing_mean,
)

MISMATCHES = {
    "rollout_corr/kl": "KL(μ ‖ learner), k1",
    "rollout_corr/k3_kl": "KL(μ ‖ learner), k3",
    "kv/dense_k3_kl": "KL(μ ‖ dense policy), k3",
    "smd/kl": "distillation KL",
    "kv/replay_gap": "replay gap",
}
"""Metrics of the mismatch figure and their labels; metrics that were not logged are left out."""


def reward_curve(history: History) -> Figure:
    """Draw the mean reward of each iteration, its moving average, and the std of rewards around it."""
    figure, axes = single_axes("Iteration", "Mean reward")
    iteration, reward = series(history, "reward")
    if len(reward) == 0:
        return empty_figure(figure, axes, "no reward was logged")
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
    """Draw the mismatch of rollout policy and learner on a log axis.

    A negative estimate is drawn at its size with an open circle; an exact 0 leaves a gap in its line.
    """
    figure, axes = single_axes("Iteration", "Mismatch (nats)")
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
        return empty_figure(figure, axes, "no mismatch was logged")
    shown = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    shown = shown[np.isfinite(shown)]
    if len(shown):
        axes.set_yscale("log")
        # Limits at decades, so that the axis always has a label.
        lowest = np.floor(np.log10(0.9 * shown.min()))  # a value on a decade is not drawn on the frame
        axes.set_ylim(10**lowest, 10 ** (np.floor(np.log10(shown.max())) + 1))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes, n_columns=2)
    return figure


CORRECTION_STYLES = {
    "token_ratio": ("ρ of tokens", MUTED),
    "sequence_ratio": ("Π ρ of responses", VERMILLION),
    "tis": ("tis", BLUE),
    "mis": ("mis", GREEN),
    "sparse_rl": ("sparse_rl", PURPLE),
}
"""Legend name and colour of each correction."""


def effective_samples(history: History) -> Figure:
    """Draw the effective sample size of each correction, and the share of rejected or clipped tokens."""
    figure = Figure(figsize=(FULL_WIDTH, HEIGHT), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, label in ((left, "Effective sample size"), (right, "Rejected or clipped tokens")):
        style_axes(axes)
        axes.set_xlabel("Iteration", fontsize=NORMAL, color=INK)
        axes.set_ylabel(label, fontsize=NORMAL, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for correction, (name, color) in CORRECTION_STYLES.items():
        for axes, statistic, verb in (
            (left, "ess", ""),
            (right, "rejected", " rejects"),
            (right, "clipped", " clips"),
        ):
            iteration, value = series(history, f"kv/arms/{correction}/{statistic}")
            if len(value):
                axes.plot(iteration, value, color=color, lw=1.6, marker=".", ms=5, label=f"{name}{verb}")
    if not left.lines:
        right.set_axis_off()
        return empty_figure(figure, left, "no correction was measured")
    sizes = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in left.lines])
    lowest = sizes[sizes > 0].min(initial=1.0)  # 0 if a correction rejects all tokens
    left.set_yscale("log")
    # Limits at decades, so that the axis always has a label.
    left.set_ylim(10 ** np.floor(np.log10(lowest) - 0.01), 1.3)
    left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    legend(left, n_columns=5)
    if right.lines:
        legend(right)
    return figure


def proxy_and_gold(history: History) -> Figure:
    """Draw the verifier's score of the rollouts (left axis) and the learned reward (right axis)."""
    figure, axes = single_axes("Iteration", "Verifier's score (gold)")
    learned_at, learned = series(history, "rewards/learned")
    gold_at, gold = series(history, "rewards/exact_match")
    if len(learned) == 0:
        return empty_figure(figure, axes, "no learned reward was logged")
    right = right_axis(axes, "Learned reward (proxy)")
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
