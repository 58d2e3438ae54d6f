"""The figure of the study: what each arm gained, seed by seed, and how it got there."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study_parts.analysis import SMOOTHING, VIEWS, Row, gained, responses_per_iteration

COLORS = {
    "dense": "#5f6673",
    "naive": "#d55e00",
    "tis": "#e69f00",
    "mis": "#c9b800",
    "sparse_rl": "#cc79a7",
    "shadow": "#56b4e9",
    "smd": "#0072b2",
    "smd_dense": "#009e73",
    "smd_current": "#8c6bb1",
    "distill": "#1b1e24",
}
"""After Okabe and Ito, one for each arm."""

LARGEST_LOSS = 25.0
"""Points; seeds that lost more are numbers at the edge, so that the others can be told apart."""


LEAST_WINDOWS = 6
"""Windows of the averaged reward that a run has at least."""
DPI = 200
"""Twice the 100 pixels per inch of a page."""


def draw(by_arm: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Points gained by each seed under the budget and with all keys; mean reward of the anchored arms."""
    figure = Figure(figsize=(7.6, 8), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.5, 1), height_ratios=(1.25, 1))
    ends = [figure.add_subplot(grid[0, column]) for column in range(2)]
    curves = figure.add_subplot(grid[1, :])
    arms = [arm for arm in COLORS if arm in by_arm or f"{arm}+anchor" in by_arm]
    for axes, (view, label) in zip(ends, VIEWS.items(), strict=True):
        _gains(axes, by_arm, arms, view)
        axes.set(xlabel=f"Points gained {label}")
    ends[1].tick_params(labelleft=False)
    _curves(curves, by_arm)
    figure.savefig(path, dpi=DPI)


def _gains(axes: Axes, by_arm: Mapping[str, Sequence[Row]], arms: Sequence[str], view: str) -> None:
    for place, arm in enumerate(arms):
        for name, shift in ((f"{arm}+anchor", -0.16), (arm, 0.16)):
            rows = by_arm.get(name, ())
            if not rows:
                continue
            points = [100 * gained(row, view) for row in rows]
            fill = COLORS[arm] if name != arm else "white"
            style = {"mec": COLORS[arm], "mfc": fill, "zorder": 3}
            y, seen = place + shift, [point for point in points if point >= -LARGEST_LOSS]
            axes.plot(seen, [y] * len(seen), "|", color=COLORS[arm], ms=7, alpha=0.6)
            mean, marker = np.mean(points), "o"
            if len(seen) < len(points):
                beyond = "← " + ", ".join(f"{point:.0f}" for point in sorted(points) if point < -LARGEST_LOSS)
                left = (-LARGEST_LOSS, y), (-6, -13)
                axes.annotate(beyond, *left, textcoords="offset points", fontsize=7, color=COLORS[arm])
            if mean < -LARGEST_LOSS:
                mean, marker = -LARGEST_LOSS, "<"
            axes.plot(mean, y, marker, ms=8, mew=1.6, **style)
    axes.plot([], [], "o", color="#5f6673", label="mean with the anchor")
    if set(arms) & set(by_arm):
        axes.plot([], [], "o", mec="#5f6673", mfc="white", label="mean without")
    axes.plot([], [], "|", color="#5f6673", label="a seed")
    axes.set_yticks(range(len(arms)), arms)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.axvline(0, color="#9aa1ad", lw=1, zorder=0)
    axes.grid(axis="x", color="#e3e6eb", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if view == "sparse":
        axes.legend(frameon=False, fontsize=8, loc="upper right")


def _curves(axes: Axes, by_arm: Mapping[str, Sequence[Row]]) -> None:
    n_averaged = SMOOTHING
    for arm, color in COLORS.items():
        rows = by_arm.get(f"{arm}+anchor", ())
        if not rows:
            continue
        n_averaged = min(SMOOTHING, len(rows[0]["rewards"]) // LEAST_WINDOWS)
        rewards = np.stack(
            [np.convolve(row["rewards"], np.ones(n_averaged) / n_averaged, "valid") for row in rows]
        )
        at = (np.arange(rewards.shape[1]) + n_averaged) * responses_per_iteration(rows[0])
        # The reward of dense is with all keys, that of the others under the budget.
        axes.plot(at, rewards.mean(0), "--" if arm == "dense" else "-", color=color, lw=1.8, label=arm)
    axes.set(xlabel="Responses sampled", ylabel=f"Reward, mean of {n_averaged} iterations", ylim=(None, 1.02))
    axes.grid(color="#e3e6eb", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.5), ncols=2)
