"""Logged metrics as curves."""

from collections.abc import Mapping, Sequence

import numpy as np

History = Sequence[Mapping[str, float | int]]
"""Logged metrics, one mapping per iteration; "iteration" is always there, a metric may be missing."""

SMOOTHING = 10
"""Iterations that a moving average looks back on."""


def series(history: History, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Iterations at which a metric was logged and finite, and its values there."""
    points = [(row["iteration"], row[metric]) for row in history if np.isfinite(row.get(metric, np.nan))]
    iteration, value = np.array(points, dtype=float).reshape(-1, 2).T
    return iteration, value


def trailing_mean(values: np.ndarray) -> np.ndarray:
    """At each place the mean of the last SMOOTHING values, or of as many as there are."""
    return np.array([values[max(0, end - SMOOTHING) : end].mean() for end in range(1, len(values) + 1)])
