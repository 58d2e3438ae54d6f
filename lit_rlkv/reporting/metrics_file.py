"""Callbacks that add the axes of a run to its metrics, and write metrics.csv."""

import csv
import io
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.files import read_if_there, write_atomically
from lit_rlkv.reporting.run_metrics import SECONDS, TOKENS, History, last_axis_values, read_metrics

log = logging.getLogger(__name__)


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


class MetricsFile(RLCallback):
    """Writes one row per iteration to a CSV file.

    `history` holds the rows. After a resume the rows up to the checkpoint are read back.

    Args:
        resumed_at: iteration of the checkpoint; 0 for a new run.
        last: metrics of that iteration in the checkpoint, for those that the file lacks; a warning then says
            how many rows are missing. None on ranks of which the checkpoint holds no metrics.
    """

    def __init__(self, path: Path, resumed_at: int = 0, last: Mapping[str, float] | None = None) -> None:
        self.path = path
        earlier = read_if_there(path, read_metrics, []) if resumed_at else []
        rows = {row["iteration"]: row for row in earlier if 1 <= row["iteration"] <= resumed_at}
        if last and resumed_at:
            rows[float(resumed_at)] = {"iteration": float(resumed_at), **last, **rows.get(resumed_at, {})}
        self.history = [rows[iteration] for iteration in sorted(rows)]
        if last is not None and len(rows) < resumed_at:
            log.warning(
                "%s lacks the rows of %d of %d iterations up to the checkpoint; plots have gaps there",
                path,
                resumed_at - len(rows),
                resumed_at,
            )
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
