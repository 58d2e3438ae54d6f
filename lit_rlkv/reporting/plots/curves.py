"""Figures of a run's metrics: rewards, accuracy, mismatch, corrections, time, memory."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from lit_rlkv.evaluation.intervals import accuracy_interval
from lit_rlkv.evaluation.results import N_BINS, EvalRow
from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.run_metrics import History

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
    axes.plot(
        iteration,
        reward,
        color=style.BLUE,
        lw=0.8,
        alpha=0.5,
        label="each iteration",
        marker=style.marker(reward),
    )
    axes.plot(iteration, smooth, color=style.BLUE, lw=2, label=f"mean of the last {style.SMOOTHING}")
    if (reward >= 0).all():
        axes.set_ylim(bottom=0)
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
    is_single = not before or not after
    evaluations = {"before": before, "after": after}
    colors = {"before": style.MUTED, "after": style.BLUE}
    shown = {"" if is_single else name: rows for name, rows in evaluations.items() if rows}
    return accuracies(shown, [colors[name] for name, rows in evaluations.items() if rows])


def accuracies(evaluations: Mapping[str, Sequence[EvalRow]], colors: Sequence[str]) -> Figure:
    """Draw the accuracy of several evaluations at each cache budget, with 95% Wilson intervals.

    A dashed line, with a band for its interval, is a dense cache.

    Args:
        evaluations: rows by the name in the legend; an empty name is a single evaluation.
    """
    figure, axes = style.single_axes("Budget (keys per sequence, layer and KV head)", "Accuracy")
    budgets = sorted({row.budget for rows in evaluations.values() for row in rows if row.budget is not None})
    for (name, rows), color, marker in zip(evaluations.items(), colors, "soD^vPX" * 9, strict=False):
        sparse = sorted((row.budget, row.accuracy) for row in rows if row.budget is not None)
        if sparse:
            x, y = zip(*sparse, strict=True)
            axes.plot(x, y, color=color, marker=marker, ms=4.5, lw=1.8, label=name or "under the budget")
        for row in rows:
            interval = accuracy_interval(row)
            if row.budget is not None and interval:
                sizes = [[row.accuracy - interval.low], [interval.high - row.accuracy]]
                axes.errorbar(
                    row.budget, row.accuracy, sizes, fmt="none", color=color, elinewidth=1.2, capsize=3
                )
            if row.budget is None:
                label = f"dense, {name}" if name else "dense"
                axes.axhline(row.accuracy, color=color, lw=1.2, ls=style.DASHED, label=label, zorder=1.5)
                if interval:
                    axes.axhspan(interval.low, interval.high, color=color, alpha=0.1, lw=0, zorder=1)
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
            axes.plot(at, negative, "o", mfc=style.PAPER, mec=color, ms=4, label=f"{name}, negative")
    style.log_decades(axes)
    return style.finish(figure, axes, n_columns=2)


def effective_samples(history: History) -> Figure:
    """Draw the effective sample size of each correction on a log axis."""
    figure, axes = style.single_axes("Iteration", "Effective share of the tokens")
    _draw_corrections(axes, history, {"ess": ""})
    sizes = style.line_heights(axes)
    lowest = sizes[sizes > 0].min(initial=1.0)  # 0 if a correction rejects all tokens
    style.log_axis(axes, 10 ** np.floor(np.log10(lowest) - 0.01), 1.3, is_share=True)
    return style.finish(figure, axes)


def rejected_tokens(history: History) -> Figure:
    """Draw the share of tokens that each correction rejects, or whose weight it clips."""
    figure, axes = style.single_axes("Iteration", "Share of the response tokens")
    _draw_corrections(axes, history, {"rejected": " rejects", "clipped": " clips"})
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(style.small_percent)
    return style.finish(figure, axes)


def _draw_corrections(axes: Axes, history: History, statistics: Mapping[str, str]) -> None:
    for correction, (name, color) in CORRECTION_STYLES.items():
        for statistic, verb in statistics.items():
            iteration, value = style.series(history, f"kv/arms/{correction}/{statistic}")
            if len(value):
                axes.plot(iteration, value, color=color, lw=1.6, marker=".", ms=5, label=f"{name}{verb}")


def time_per_phase(history: History) -> Figure:
    """Draw the seconds of each phase and of the diagnostics, one upon the other."""
    figure, axes = style.single_axes("Iteration", "Seconds")
    measured, _ = style.series(history, "time/rollout")
    iterations = np.arange(measured[0], measured[-1] + 1)
    edges = np.append(iterations - 0.5, iterations[-1] + 0.5)
    bottom = np.where(np.isin(iterations, measured), 0.0, np.nan)  # a gap where nothing was measured
    layers = [(phase, color, _at(history, f"time/{phase}", iterations)) for phase, color in PHASES.items()]
    names = {name for row in history for name in row if name.startswith("time/diagnostics/")}
    extra = np.sum([_at(history, name, iterations) for name in sorted(names)], axis=0)
    for label, color, seconds in (*layers, ("diagnostics", style.SAND, extra + np.zeros(len(iterations)))):
        axes.stairs(bottom + seconds, edges, baseline=bottom, fill=True, color=color, lw=0, label=label)
        bottom = bottom + seconds
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1.05 * np.nanmax(bottom))
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
    axes.set_ylim(0, 1.1 * style.line_heights(axes).max())
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
