"""metrics.csv: what a run logged, whole at any moment, whatever logger it has beside it."""

import csv
import io
import logging
from pathlib import Path

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.files import complete_lines, write_atomically

log = logging.getLogger(__name__)


class MetricsFile(RLCallback):
    """One row per iteration in a CSV file, which is whole at any moment.

    `history` holds the rows; those of an earlier part of the run are read back, up to the iteration it goes
    on from.
    """

    def __init__(self, path: Path, resumed_at: int = 0) -> None:
        self.path = path
        earlier = read_metrics(path) if resumed_at else []
        self.history = [row for row in earlier if row["iteration"] <= resumed_at]
        self.columns = dict.fromkeys(name for row in self.history for name in row)
        self._is_behind = False
        """The file lacks rows, or ends within one."""
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
                log.warning("%s cannot be written, and is made up for later: %s", self.path, error)
            self._is_behind = True

    def _rewrite(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(self.columns))
        writer.writeheader()
        writer.writerows(self.history)
        write_atomically(self.path, text.getvalue())


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The whole rows of a metrics file, whoever is writing it; empty cells are left out."""
    rows = csv.DictReader(complete_lines(path))
    return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]
