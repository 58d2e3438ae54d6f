"""Analysis of the study: means over seeds, paired differences, rollouts to an accuracy."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from study_parts.plan import N_RESPONSES, OTHER_RESPONSES

from lit_rlkv.evaluation.intervals import t_level, t_quantile

Row = Mapping[str, Any]

SMOOTHING = 10
"""Iterations over which the reward is averaged before it is compared with a threshold."""


VIEWS = {"sparse": "under the budget", "dense": "with all keys"}
"""Kinds of evaluation, by the prefix of a row's names."""
N_FIRST = 20
"""Iterations in which a learning rate that is too high shows."""


@dataclass(frozen=True)
class Contrast:
    """A paired difference of two arms over seeds."""

    first: str
    second: str
    measure: str
    n: int
    mean: float
    half_width: float
    """Half the width of the 95 % confidence interval of the mean (Student's t)."""
    p: float
    """Two-sided, of no difference (paired t-test)."""


def pairs_of(first: Sequence[Row], second: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Rows of one seed in both, from one kind of processor."""
    theirs = {place(row): row for row in second}
    return [(row, theirs[place(row)]) for row in first if place(row) in theirs]


def place(row: Row) -> tuple[int, str]:
    """Seed and kind of processor: within a comparison, runs that share both start from one SFT model."""
    return row["seed"], processor(row)


def processor(row: Row) -> str:
    """The kind that it was measured on."""
    return str(row.get("device", "")).partition(",")[0]


def contrast(first: Sequence[Row], second: Sequence[Row], measure: str) -> Contrast:
    """First minus second, by seed.

    Raises:
        ValueError: fewer than two pairs are in both, a seed is in one of them twice, or a pair does not
            start from the same SFT model.
    """
    for rows in (first, second):
        if len({row["seed"] for row in rows}) < len(rows):
            raise ValueError(f"{rows[0]['name']}: a seed has several rows, which are of several settings")
    pairs = pairs_of(first, second)
    if len(pairs) < 2:
        raise ValueError(
            f"{len(pairs)} seeds in both, on one kind of processor; a paired difference needs at least 2"
        )
    for pair in pairs:
        starts = [row["dense_accuracy_before"] for row in pair]
        if starts[0] != starts[1]:
            raise ValueError(
                f"seed {pair[0]['seed']}: {pair[0]['name']} started at {starts[0]:.1%} with all keys and "
                f"{pair[1]['name']} at {starts[1]:.1%}, so from different SFT models; run one of them again"
            )
    differences = [a[measure] - b[measure] for a, b in pairs]
    n, mean = len(differences), statistics.mean(differences)
    error = statistics.stdev(differences) / n**0.5
    t = abs(mean) / error if error > 0 else float("inf") if mean else 0.0
    return Contrast(
        str(first[0]["name"]),
        str(second[0]["name"]),
        measure,
        n,
        mean,
        half_width=error * t_quantile(0.95, n - 1),
        p=1 - t_level(t, n - 1),
    )


def holm(contrasts: Sequence[Contrast]) -> list[float]:
    """p-values adjusted for the number of questions asked (Holm 1979), in the order given."""
    order = sorted(range(len(contrasts)), key=lambda index: contrasts[index].p)
    adjusted, largest = [0.0] * len(contrasts), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, (len(contrasts) - rank) * contrasts[index].p)
        adjusted[index] = min(largest, 1.0)
    return adjusted


def rollouts_to(row: Row, accuracy: float) -> int | None:
    """Responses sampled until the trailing mean of the reward first reached an accuracy; None: never."""
    rewards = np.asarray(row["rewards"], dtype=float)
    if len(rewards) < SMOOTHING:
        return None
    trailing = np.convolve(rewards, np.ones(SMOOTHING) / SMOOTHING, mode="valid")
    reached = np.flatnonzero(trailing >= accuracy - 1e-9)  # sums of tenths
    return None if len(reached) == 0 else int(reached[0] + SMOOTHING) * responses_per_iteration(row)


def responses_per_iteration(row: Row) -> int:
    return OTHER_RESPONSES.get(row["task"], N_RESPONSES)


def gained(row: Row, view: str) -> float:
    """Accuracy after training minus the SFT model's, `sparse` or `dense`."""
    return row[f"{view}_accuracy_after"] - row[f"{view}_accuracy_before"]


def lowest_at_first(row: Row) -> float:
    """The lowest reward of the first iterations."""
    return min(row["rewards"][:N_FIRST])


def mean_sd(values: Sequence[float], scale: float = 100.0, digits: int = 1) -> str:
    """`mean ± sd`, the sd over seeds."""
    spread = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * statistics.mean(values):.{digits}f}{spread}"
