"""The block `overlap`: accuracy and stability by the overlap of sampler and dense policy."""

import statistics
from collections.abc import Sequence
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from study_parts.analysis import VIEWS, Row, gained, mean_sd
from study_parts.plot import COLORS, DPI

from lit_rlkv.reporting.tables import markdown_table

THRESHOLD = 0.86
"""The 5th percentile from which rollouts under a small cache are said to be stable (arXiv:2606.08446)."""
N_MEAN = 5
LABELS = {"dense": "nothing evicted", "naive": "no replay", "shadow": "replay"}
MARKERS = {"random": "o", "snapkv": "s"}
SHADES = {"dense": COLORS["dense"], "naive": COLORS["naive"], "shadow": COLORS["smd"]}


def overlap(row: Row) -> float:
    """Return the lowest 5th percentile of any position, the mean over the measured iterations."""
    return statistics.mean(row["overlap_p05"])


def largest_drop(row: Row) -> float:
    """Return how far the mean reward of up to the latest `N_MEAN` iterations fell below its best so far."""
    rewards = row["rewards"]
    trailing = [statistics.mean(rewards[max(n - N_MEAN, 0) : n]) for n in range(1, len(rewards) + 1)]
    return float((np.maximum.accumulate(trailing) - trailing).max())


def table(rows: Sequence[Row]) -> str:
    """Return means ± standard deviations over seeds by learning rate, cache and arm."""
    headings = ["rate", "cache", "arm", "seeds", "overlap", "lowest"]
    headings += [f"gained {label}" for label in VIEWS.values()]
    headings += ["largest drop of the reward", "ended below their start"]
    place = itemgetter("lr", "policy", "budget", "arm")
    body = []
    for (lr, policy, budget, arm), found in groupby(sorted(rows, key=place), place):
        mine = list(found)
        n_below = [sum(gained(row, view) < 0 for row in mine) for view in VIEWS]
        body.append(
            [
                f"{lr:g}",
                "dense" if arm == "dense" else f"{policy} {budget}",
                LABELS[arm],
                str(len(mine)),
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
    figure = Figure(figsize=(7.6, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, (view, label) in zip(panels, VIEWS.items(), strict=True):
        for arm, policy in [("dense", "random"), *product(("naive", "shadow"), MARKERS)]:
            mine = [row for row in rows if (row["arm"], row["policy"]) == (arm, policy)]
            axes.plot(
                [overlap(row) for row in mine],
                [100 * gained(row, view) for row in mine],
                "^" if arm == "dense" else MARKERS[policy],
                color=SHADES[arm],
                alpha=0.75,
                label=LABELS[arm] if arm == "dense" else f"{LABELS[arm]}, {policy}",
            )
        axes.axhline(0, color="#9aa1ad", lw=1, zorder=0)
        axes.axvline(THRESHOLD, color="#5f6673", ls="--", lw=1, zorder=0)
        axes.set(xlabel="Overlap, 5th percentile", ylabel=f"Points gained {label}", xlim=(-0.03, 1.03))
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), frameon=False, fontsize=8, ncols=5, loc="outside upper center"
    )
    figure.savefig(path, dpi=DPI)
