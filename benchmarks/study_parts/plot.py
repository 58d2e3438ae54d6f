"""The figure of the study: where each arm ends, and how it got there."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from study_parts.analysis import RESPONSES_PER_ITERATION, SMOOTHING, Row

COLORS = {
    "dense": "#5f6673",
    "naive": "#d55e00",
    "tis": "#e69f00",
    "mis": "#f0e442",
    "sparse_rl": "#cc79a7",
    "shadow": "#56b4e9",
    "smd": "#0072b2",
    "smd_dense": "#009e73",
}
"""Okabe and Ito, one for each arm."""


def draw(by_arm: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Left: accuracy dense against under the budget. Right: reward over responses, anchored arms."""
    figure = Figure(figsize=(10.4, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _endpoints(left, by_arm)
    _curves(right, by_arm)
    figure.savefig(path, dpi=160)


def _endpoints(axes: Axes, by_arm: Mapping[str, Sequence[Row]]) -> None:
    start = next(iter(by_arm.values()))
    x, y = (_mean_sd(start, f"{view}_accuracy_before") for view in ("dense", "sparse"))
    axes.errorbar(x[0], y[0], y[1], x[1], fmt="k+", ms=11, lw=1, label="start")
    for name, rows in by_arm.items():
        arm, _, anchor = name.partition("+")
        if arm not in COLORS:
            continue
        x, y = (_mean_sd(rows, f"{view}_accuracy_after") for view in ("dense", "sparse"))
        style = {"mfc": COLORS[arm] if anchor else "white", "mec": COLORS[arm], "ecolor": COLORS[arm]}
        label = arm if anchor else None
        axes.errorbar(x[0], y[0], y[1], x[1], fmt="o", ms=8, mew=1.8, elinewidth=0.8, label=label, **style)
    axes.plot([], [], "o", mfc="white", mec="#5f6673", label="without anchor")
    axes.set(xlabel="Accuracy with all keys", ylabel="Accuracy under the budget")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(color="#e3e6eb", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _curves(axes: Axes, by_arm: Mapping[str, Sequence[Row]]) -> None:
    for name, rows in by_arm.items():
        arm, _, anchor = name.partition("+")
        if arm not in COLORS or not anchor:
            continue
        rewards = np.stack(
            [np.convolve(row["rewards"], np.ones(SMOOTHING) / SMOOTHING, "valid") for row in rows]
        )
        at = (np.arange(rewards.shape[1]) + SMOOTHING) * RESPONSES_PER_ITERATION
        mean, sd = rewards.mean(0), rewards.std(0, ddof=1 if len(rewards) > 1 else 0)
        axes.plot(at, mean, color=COLORS[arm], lw=1.8, label=arm)
        axes.fill_between(at, mean - sd, mean + sd, color=COLORS[arm], alpha=0.1, lw=0)
    axes.set(xlabel="Responses sampled", ylabel=f"Reward of the rollouts, mean of {SMOOTHING} iterations")
    axes.grid(color="#e3e6eb", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def _mean_sd(rows: Sequence[Row], name: str) -> tuple[float, float]:
    values = np.array([row[name] for row in rows], dtype=float)
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0
