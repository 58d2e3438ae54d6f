"""Metrics of a run: axes, metrics.csv, and final metrics."""

import csv
import io
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.evaluation.results import EvalRow
from lit_rlkv.files import complete_lines, write_atomically

log = logging.getLogger(__name__)

ITERATION, TOKENS, SECONDS = "iteration", "rollout/tokens", "time/wall_clock_s"
AXES = (ITERATION, TOKENS, SECONDS)

AxisValues = dict[str, float]
"""A value for each of AXES."""

History = Sequence[Mapping[str, float | int]]


class RunAxes(RLCallback):
    """Adds `rollout/tokens` and `time/wall_clock_s`; must come after RolloutStatistics.

    Both continue from the last row of `history`, the rows before a resume. Repeated iterations and the time
    between a stop and a resume do not count.
    """

    def __init__(self, history: History = ()) -> None:
        earlier = last_axis_values(history)
        self.n_tokens = earlier[TOKENS]
        self.earlier_s = earlier[SECONDS]
        self._started_at = time.perf_counter()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._started_at = time.perf_counter()

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        self.n_tokens += metrics["num_tokens"]
        metrics[TOKENS] = self.n_tokens
        metrics[SECONDS] = self.earlier_s + time.perf_counter() - self._started_at


def last_axis_values(history: History) -> AxisValues:
    """Return the axis values of the last row; zeros if there is none."""
    return {axis: float(history[-1][axis]) if history else 0.0 for axis in AXES}


class MetricsFile(RLCallback):
    """Writes one row per iteration to a CSV file.

    `history` holds the rows. After a resume the rows up to the checkpoint are read back.
    """

    def __init__(self, path: Path, resumed_at: int = 0) -> None:
        self.path = path
        earlier = read_metrics(path) if resumed_at else []
        self.history = [row for row in earlier if row["iteration"] <= resumed_at]
        self.columns = dict.fromkeys(name for row in self.history for name in row)
        self._is_behind = False
        """True if the file lacks rows or ends within one."""
        self._rewrite()

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        row = {"iteration": float(iteration), **metrics}
        self.history.append(row)
        is_known = row.keys() <= self.columns.keys() and not self._is_behind
        self.columns |= dict.fromkeys(row)
        try:
            if is_known:
                with self.path.open("a", newline="") as file:
                    csv.DictWriter(file, list(self.columns)).writerow(row)
            else:
                self._rewrite()
            self._is_behind = False
        except OSError as error:  # such as a full disk
            if not self._is_behind:
                log.warning("%s cannot be written; it is rewritten later: %s", self.path, error)
            self._is_behind = True

    def _rewrite(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(self.columns))
        writer.writeheader()
        writer.writerows(self.history)
        write_atomically(self.path, text.getvalue())


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the complete rows of a metrics file, without empty cells."""
    rows = csv.DictReader(complete_lines(path))
    return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]


FINAL_METRICS = (
    "eval/accuracy",
    "eval/dense_accuracy",
    "eval/accuracy_gain",
    "eval/dense_accuracy_gain",
    "eval/kl",
    "eval/kv_bytes",
    "eval/learned_reward",
)
"""Names that `final_metrics` may return, in order."""


def final_metrics(
    before: Sequence[EvalRow], after: Sequence[EvalRow], budget: int | None
) -> dict[str, float]:
    """Return the results of the evaluation at the end of a run; empty if there was none.

    `eval/accuracy`, `eval/kl`, `eval/kv_bytes` and `eval/learned_reward` are under the run's own cache,
    `eval/dense_accuracy` is under a dense cache. A gain is the accuracy after minus before training, if both
    were measured.

    Args:
        budget: budget of the run's own cache; None if it is dense.
    """
    found: dict[str, float] = {}
    for accuracy, under in (("eval/accuracy", budget), ("eval/dense_accuracy", None)):
        row, earlier = (next((r for r in rows if r.budget == under), None) for rows in (after, before))
        if row is None:
            continue
        found[accuracy] = row.accuracy
        if earlier is not None:
            found[f"{accuracy}_gain"] = row.accuracy - earlier.accuracy
        if accuracy == "eval/accuracy":
            found |= {"eval/kl": row.kl, "eval/kv_bytes": float(row.kv_bytes)}
            if row.learned_reward is not None:
                found["eval/learned_reward"] = row.learned_reward
    return {name: found[name] for name in FINAL_METRICS if name in found}
