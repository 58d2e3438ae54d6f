"""The block `overlap`: accuracy and stability by the overlap of sampler and dense policy."""

import statistics
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from study_parts.analysis import SMOOTHING, VIEWS, Row, gained, mean_sd
from study_parts.plot import COLORS, DPI

from lit_rlkv.reporting.tables import markdown_table

THRESHOLD = 0.86
"""The 5th percentile from which rollouts under a small cache are said to be stable (arXiv:2606.08446)."""
LABELS = {"naive": "no replay", "shadow": "replay"}
MARKERS = {"random": "o", "snapkv": "s"}


def overlap(row: Row) -> float:
    """Return the lowest 5th percentile of any position, the mean over the measured iterations."""
    return statistics.mean(row["overlap_p05"])


def largest_drop(row: Row) -> float:
    """Return how far the trailing mean of the reward fell below its best so far."""
    trailing = np.convolve(row["rewards"], np.ones(SMOOTHING) / SMOOTHING, mode="valid")
    return float((np.maximum.accumulate(trailing) - trailing).max())


def table(rows: Sequence[Row]) -> str:
    """Return means ± standard deviations over seeds by cache and arm."""
    headings = ["cache", "arm", "overlap", "lowest"]
    headings += [f"gained {label}" for label in VIEWS.values()]
    headings += ["largest drop of the reward", "ended below their start"]
    place = itemgetter("policy", "budget", "arm")
    body = []
    for (policy, budget, arm), found in groupby(sorted(rows, key=place), place):
        mine = list(found)
        n_below = [sum(gained(row, view) < 0 for row in mine) for view in VIEWS]
        body.append(
            [
                f"{policy} {budget}",
                f"{LABELS[arm]}",
                mean_sd([overlap(row) for row in mine], 1, 2),
                f"{min(min(row['overlap_p05']) for row in mine):.3f}",
                *(mean_sd([gained(row, view) for row in mine]) for view in VIEWS),
                mean_sd([largest_drop(row) for row in mine], 1, 3),
                " and ".join(f"{n} of {len(mine)}" for n in n_below),
            ]
        )
    return markdown_table(headings, body)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the points that each run gained over its overlap."""
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    for axes, (view, label) in zip(figure.subplots(1, 2), VIEWS.items(), strict=True):
        for arm in LABELS:
            for policy, marker in MARKERS.items():
                mine = [row for row in rows if (row["arm"], row["policy"]) == (arm, policy)]
                points = [100 * gained(row, view) for row in mine]
                axes.plot(
                    [overlap(row) for row in mine],
                    points,
                    marker,
                    color=COLORS[arm],
                    alpha=0.8,
                    label=f"{LABELS[arm]}, {policy}",
                )
        axes.axhline(0, color="#9aa1ad", lw=1, zorder=0)
        axes.axvline(THRESHOLD, color="#5f6673", ls="--", lw=1, zorder=0)
        axes.text(THRESHOLD - 0.01, 0.02, f"{THRESHOLD} ", transform=axes.get_xaxis_transform(), ha="right")
        axes.set(xlabel="Overlap, 5th percentile of the worst positions", ylabel=f"Points gained {label}")
        axes.set_xlim(-0.03, 1.03)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=DPI)
