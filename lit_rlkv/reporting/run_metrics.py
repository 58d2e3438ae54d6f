"""Metrics of a run: axes, the rows of metrics.csv, and final metrics; without torch."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_rlkv.evaluation.results import EvalRow
from lit_rlkv.files import complete_lines

ITERATION, TOKENS, SECONDS = "iteration", "rollout/tokens", "time/wall_clock_s"
AXES = (ITERATION, TOKENS, SECONDS)

AxisValues = dict[str, float]
"""A value for each of AXES."""

History = Sequence[Mapping[str, float | int]]
"""Logged metrics, one mapping per iteration with "iteration"; other metrics may be missing."""


def last_axis_values(history: History) -> AxisValues:
    """Return the axis values of the last row; zeros if there is none, or if it lacks them."""
    return {axis: float(history[-1].get(axis, 0.0)) if history else 0.0 for axis in AXES}


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the complete rows of a metrics file, without empty cells.

    Raises:
        ValueError: a cell is not a number, or a row has no finite iteration or not one cell per heading.
    """
    try:
        rows = list(csv.DictReader(complete_lines(path)))
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if any(None in row or None in row.values() or not row.get(ITERATION) for row in rows):
        raise ValueError("every row must have an iteration, and one cell for each heading")
    found = [{name: float(cell) for name, cell in row.items() if cell} for row in rows]
    if not all(math.isfinite(row[ITERATION]) for row in found):
        raise ValueError("every iteration must be finite")
    return found


FINAL_METRICS = (
    "eval/accuracy",
    "eval/dense_accuracy",
    "eval/accuracy_gain",
    "eval/dense_accuracy_gain",
    "eval/reward",
    "eval/dense_reward",
    "eval/kl",
    "eval/kv_bytes",
    "eval/learned_reward",
    "eval/perplexity",
    "eval/dense_perplexity",
)
"""Names that `final_metrics` may return, in order."""


def final_metrics(before: Sequence[EvalRow], after: Sequence[EvalRow], cache: str) -> dict[str, float]:
    """Return the results of the evaluation at the end of a run; empty if there was none.

    `eval/dense_accuracy`, `eval/dense_reward` and `eval/dense_perplexity` are under a dense cache, the others
    under the run's own. A gain is the accuracy after minus before training, if both were measured.

    Args:
        cache: name of the run's own cache.
    """
    found: dict[str, float | None] = {}
    for prefix, under in (("eval/", cache), ("eval/dense_", "dense")):
        row, earlier = (next((r for r in rows if r.cache == under), None) for rows in (after, before))
        if row is None:
            continue
        found |= {f"{prefix}{name}": getattr(row, name) for name in ("accuracy", "reward", "perplexity")}
        if earlier is not None and row.accuracy is not None and earlier.accuracy is not None:
            found[f"{prefix}accuracy_gain"] = row.accuracy - earlier.accuracy
        if under == cache:
            found |= {"eval/kl": row.kl, "eval/kv_bytes": float(row.kv_bytes)}
            found["eval/learned_reward"] = row.learned_reward
    return {name: value for name in FINAL_METRICS if (value := found.get(name)) is not None}
