"""Figures of a run's metrics: rewards, accuracy, mismatch, corrections, time, memory."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from lit_rlkv.evaluation.results import N_BINS, EvalRow
from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.plots.style import History

MISMATCHES = {
    "rollout_corr/kl": ("KL(μ ‖ learner), k1", style.BLUE),
    "rollout_corr/k3_kl": ("KL(μ ‖ learner), k3", style.GREEN),
    "kv/dense_k3_kl": ("KL(μ ‖ dense policy), k3", style.MUTED),
    "smd/kl": ("distillation KL", style.PURPLE),
    "kv/replay_gap": ("replay gap", style.VERMILLION),
}
"""Label and colour of each metric in the mismatch figure."""

CORRECTION_STYLES = {
    "token_ratio": ("ρ of tokens", style.MUTED),
    "sequence_ratio": ("Π ρ of responses", style.VERMILLION),
    "tis": ("tis", style.BLUE),
    "mis": ("mis", style.GREEN),
    "sparse_rl": ("sparse_rl", style.PURPLE),
}
"""Legend name and colour of each correction."""

PHASES = {"rollout": style.BLUE, "score": style.GREEN, "reward": style.PURPLE, "update": style.VERMILLION}
"""Colour of each phase, from bottom to top."""

MEMORY = {"peak": "allocated at most", "resident_peak": "resident at most"}
"""Metrics of peak memory (CUDA, other devices) and their axis labels."""

MIB = 2**20


def reward_curve(history: History) -> Figure:
    """Draw the mean reward of each iteration, its moving average, and the std of rewards around it."""
    figure, axes = style.single_axes("Iteration", "Mean reward")
    iteration, reward = style.series(history, "reward")
    smooth = style.trailing_mean(reward)
    spread_at, spread = style.series(history, "reward_std")
    if np.array_equal(spread_at, iteration):
        band = style.trailing_mean(spread)
        axes.fill_between(
            iteration, smooth - band, smooth + band, color=style.BLUE, alpha=0.13, lw=0, label="± reward std"
        )
    axes.plot(iteration, reward, color=style.BLUE, lw=0.8, alpha=0.5, label="each iteration")
    axes.plot(iteration, smooth, color=style.BLUE, lw=2, label=f"mean of the last {style.SMOOTHING}")
    return style.finish(figure, axes)


def proxy_and_gold(history: History) -> Figure:
    """Draw the verifier's score of the rollouts (left axis) and the learned reward (right axis)."""
    figure, axes = style.single_axes("Iteration", "Verifier's score (gold)")
    right = style.right_axis(axes, "Learned reward (proxy)")
    for metric, side, color, label in (
        ("rewards/exact_match", axes, style.BLUE, "gold, left axis"),
        ("rewards/learned", right, style.VERMILLION, None),
    ):
        iteration, value = style.series(history, metric)
        if len(value):
            side.plot(iteration, value, color=color, lw=0.8, alpha=0.4)
            side.plot(iteration, style.trailing_mean(value), color=color, lw=2, label=label)
    style.share_axis(axes)
    axes.plot([], [], color=style.VERMILLION, lw=2, label="proxy, right axis")  # for the style.legend
    return style.finish(figure, axes)


def accuracy_against_budget(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> Figure:
    """Draw the accuracy at each cache budget; a dashed line is the same model with a dense cache."""
    figure, axes = style.single_axes("Budget (keys per sequence, layer and KV head)", "Accuracy")
    budgets = sorted({row.budget for row in (*before, *after) if row.budget is not None})
    is_single = not before or not after
    for rows, name, color, marker in (
        (before, "before", style.MUTED, "s"),
        (after, "after", style.BLUE, "o"),
    ):
        label, dense_label = ("under the budget", "dense") if is_single else (name, f"dense, {name}")
        sparse = sorted((row.budget, row.accuracy) for row in rows if row.budget is not None)
        if sparse:
            axes.plot(*zip(*sparse, strict=True), color=color, marker=marker, ms=5, lw=1.8, label=label)
        for row in rows:
            if row.budget is None:
                axes.axhline(
                    row.accuracy, color=color, lw=1.2, ls=style.DASHED, label=dense_label, zorder=1.5
                )
    style.share_axis(axes)
    if budgets:
        axes.set_xscale("log", base=2)
        axes.set_xlim(budgets[0] / 1.15, budgets[-1] * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    style.legend(axes)
    return figure


def reliability(confidence: Sequence[float], accuracy: Sequence[float], counts: Sequence[int]) -> Figure:
    """Draw the accuracy of a reward head against its confidence; a calibrated head lies on the diagonal.

    Args:
        confidence: mean P(first is better) of each non-empty bin, in ascending order.
        accuracy: share of comparisons in which the first is better, of each bin.
        counts: comparisons in each bin; bars show their shares.
    """
    figure, axes = style.single_axes("Predicted: the first is better", "Observed")
    share = np.array(counts) / np.sum(counts)
    place = np.minimum(np.floor(np.array(confidence) * N_BINS), N_BINS - 1)
    axes.bar(
        (place + 0.5) / N_BINS, share, width=0.9 / N_BINS, color=style.SAND, label="share of comparisons"
    )
    axes.plot([0, 1], [0, 1], color=style.MUTED, lw=1.2, ls=style.DASHED, label="calibrated")
    axes.plot(confidence, accuracy, color=style.BLUE, marker="o", ms=5, lw=1.8, label="reward head")
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(style.PERCENT)
    style.legend(axes)
    return figure


def mismatch(history: History) -> Figure:
    """Draw the mismatch of rollout policy and learner on a log axis.

    A negative estimate is drawn at its size with an open circle; an exact 0 leaves a gap in its line.
    """
    figure, axes = style.single_axes("Iteration", "Mismatch (nats)")
    for metric, (name, color) in MISMATCHES.items():
        iteration, value = style.series(history, metric)
        if len(value) == 0:
            continue
        size = np.where(value == 0, np.nan, np.abs(value))
        label = name if np.isfinite(size).any() else f"{name}: 0 throughout"
        axes.plot(iteration, size, color=color, lw=1.4, marker="." if len(value) == 1 else None, label=label)
        is_negative = value < 0
        if is_negative.any():
            at, negative = iteration[is_negative], size[is_negative]
            axes.plot(at, negative, "o", mfc="white", mec=color, ms=4, label=f"{name}, negative")
    shown = _heights(axes)
    shown = shown[np.isfinite(shown)]
    if len(shown):
        lowest = np.floor(np.log10(0.9 * shown.min()))  # a value on a decade is not drawn on the frame
        style.log_axis(axes, 10**lowest, 10 ** (np.floor(np.log10(shown.max())) + 1))
    return style.finish(figure, axes, n_columns=2)


def effective_samples(history: History) -> Figure:
    """Draw the effective sample size of each correction, and the share of rejected or clipped tokens."""
    figure, left, right = style.two_axes()
    for axes, label in ((left, "Effective sample size"), (right, "Rejected or clipped tokens")):
        style.style_axes(axes)
        style.label_axes(axes, "Iteration", label)
    for correction, (name, color) in CORRECTION_STYLES.items():
        for axes, statistic, verb in (
            (left, "ess", ""),
            (right, "rejected", " rejects"),
            (right, "clipped", " clips"),
        ):
            iteration, value = style.series(history, f"kv/arms/{correction}/{statistic}")
            if len(value):
                axes.plot(iteration, value, color=color, lw=1.6, marker=".", ms=5, label=f"{name}{verb}")
    sizes = _heights(left)
    lowest = sizes[sizes > 0].min(initial=1.0)  # 0 if a correction rejects all tokens
    style.log_axis(left, 10 ** np.floor(np.log10(lowest) - 0.01), 1.3, is_share=True)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(style.small_percent)
    style.integer_ticks(right.xaxis)
    if right.lines:
        style.legend(right)
    return style.finish(figure, left, n_columns=5)


def _heights(axes: Axes) -> np.ndarray:
    """Return the y values of all lines."""
    return np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])


def time_per_phase(history: History) -> Figure:
    """Draw stacked bars of the seconds of each phase and of the diagnostics."""
    figure, axes = style.single_axes("Iteration", "Seconds")
    iteration, _ = style.series(history, "time/rollout")
    bottom = np.zeros(len(iteration))
    layers = [(phase, color, _at(history, f"time/{phase}", iteration)) for phase, color in PHASES.items()]
    names = {name for row in history for name in row if name.startswith("time/diagnostics/")}
    extra = np.sum([_at(history, name, iteration) for name in sorted(names)], axis=0)
    for label, color, seconds in (*layers, ("diagnostics", style.SAND, extra)):
        axes.bar(iteration, seconds, bottom=bottom, width=1.0, color=color, lw=0, label=label)
        bottom = bottom + seconds
    axes.set_xlim(iteration[0] - 0.5, iteration[-1] + 0.5)
    return style.finish(figure, axes, n_columns=5)


def _at(history: History, metric: str, iterations: np.ndarray) -> np.ndarray:
    """Return the metric at these iterations; 0 where it was not logged."""
    logged = dict(zip(*style.series(history, metric), strict=True))
    return np.array([logged.get(iteration, 0.0) for iteration in iterations])


def memory_per_phase(history: History) -> Figure:
    """Draw the peak memory of each phase."""
    figure, axes = style.single_axes("Iteration", "")
    for kind, meaning in MEMORY.items():
        for phase, color in PHASES.items():
            iteration, peak = style.series(history, f"memory/{phase}/{kind}")
            if len(peak):
                axes.plot(iteration, peak / MIB, color=color, lw=1.6, marker=".", ms=4, label=phase)
                axes.set_ylabel(f"MiB {meaning}", fontsize=style.NORMAL, color=style.INK)
    axes.set_ylim(0, 1.1 * _heights(axes).max())
    return style.finish(figure, axes, n_columns=4)


def time_per_stage(stage_seconds: Mapping[str, float | int]) -> Figure:
    """Draw the wall-clock seconds of each stage, in order."""
    figure, axes = style.single_axes("Seconds", "", height=0.9 + 0.34 * len(stage_seconds))
    bars = axes.barh(list(stage_seconds), list(stage_seconds.values()), color=style.BLUE, height=0.6)
    axes.bar_label(bars, fmt="{:,.1f}", padding=4, fontsize=style.SMALL, color=style.INK)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", labelsize=style.NORMAL, labelcolor=style.INK)
    return figure
