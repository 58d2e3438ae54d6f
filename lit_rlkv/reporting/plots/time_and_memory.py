"""Figures of time and memory: each phase of an iteration, each stage of a run."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lit_rlkv.reporting.plots.style import (
    BLUE,
    GREEN,
    INK,
    NORMAL,
    PURPLE,
    SAND,
    SMALL,
    VERMILLION,
    History,
    empty_figure,
    legend,
    series,
    single_axes,
)

TIMES = {
    "time/rollout": ("rollout", BLUE),
    "time/score": ("score", GREEN),
    "time/reward": ("reward", PURPLE),
    "time/update": ("update", VERMILLION),
}
"""Label and colour of each phase, from bottom to top."""

MEMORY = {
    "peak": "allocated at most",
    "resident_peak": "resident at most",
}
"""Metrics of peak memory (CUDA, other devices) and their axis labels."""

MIB = 2**20


def time_per_phase(history: History) -> Figure:
    """Draw stacked bars of the seconds of each phase and of the diagnostics."""
    figure, axes = single_axes("Iteration", "Seconds")
    iteration, rollout = series(history, "time/rollout")
    if len(rollout) == 0:
        return empty_figure(figure, axes, "no phase was timed")
    bottom = np.zeros(len(iteration))
    layers = [(label, color, _at(history, name, iteration)) for name, (label, color) in TIMES.items()]
    names = {name for row in history for name in row if name.startswith("time/diagnostics/")}
    extra = np.sum([_at(history, name, iteration) for name in sorted(names)], axis=0)
    for label, color, seconds in (*layers, ("diagnostics", SAND, extra)):
        axes.bar(iteration, seconds, bottom=bottom, width=1.0, color=color, lw=0, label=label)
        bottom = bottom + seconds
    axes.set_xlim(iteration[0] - 0.5, iteration[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes, n_columns=5)
    return figure


def has_memory(history: History) -> bool:
    """True if memory was logged; some platforms do not report it."""
    return any(f"memory/rollout/{kind}" in row for kind in MEMORY for row in history)


def memory_per_phase(history: History) -> Figure:
    """Draw the peak memory of each phase."""
    figure, axes = single_axes("Iteration", "")
    for kind, meaning in MEMORY.items():
        for name, (label, color) in TIMES.items():
            iteration, peak = series(history, f"memory/{name.removeprefix('time/')}/{kind}")
            if len(peak):
                axes.plot(iteration, peak / MIB, color=color, lw=1.6, marker=".", ms=4, label=label)
                axes.set_ylabel(f"MiB {meaning}", fontsize=NORMAL, color=INK)
    if not axes.lines:
        return empty_figure(figure, axes, "no memory was measured")
    highest = max(float(np.max(line.get_ydata())) for line in axes.lines)
    axes.set_ylim(0, 1.1 * highest)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes, n_columns=4)
    return figure


def _at(history: History, metric: str, iterations: np.ndarray) -> np.ndarray:
    """Return the metric at these iterations; 0 where it was not logged."""
    logged = dict(zip(*series(history, metric), strict=True))
    return np.array([logged.get(iteration, 0.0) for iteration in iterations])


def time_per_stage(stage_seconds: Mapping[str, float | int]) -> Figure:
    """Draw the wall-clock seconds of each stage, in order."""
    figure, axes = single_axes("Seconds", "", height=0.9 + 0.34 * len(stage_seconds))
    if not stage_seconds:
        return empty_figure(figure, axes, "no stage was timed")
    bars = axes.barh(list(stage_seconds), list(stage_seconds.values()), color=BLUE, height=0.6)
    axes.bar_label(bars, fmt="{:,.1f}", padding=4, fontsize=SMALL, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", labelsize=NORMAL, labelcolor=INK)
    return figure
