"""metrics.csv: what a run logged, whole at any moment, whatever logger it has beside it."""

import csv
import io
from pathlib import Path

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.files import write_atomically


class MetricsFile(RLCallback):
    """One row per iteration in a CSV file, which is whole at any moment.

    `history` holds the rows; those of an earlier part of the run are read back, up to the iteration it goes
    on from.
    """

    def __init__(self, path: Path, resumed_at: int = 0) -> None:
        self.path = path
        self.history: list[dict[str, float]] = []
        self.columns: dict[str, None] = {}
        if resumed_at > 0 and path.is_file():
            with path.open(newline="") as file:
                rows = [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]
            self.history = [row for row in rows if row["iteration"] <= resumed_at]
            self.columns = dict.fromkeys(name for row in self.history for name in row)
        self._rewrite()

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        row = {"iteration": float(iteration), **metrics}
        self.history.append(row)
        if row.keys() <= self.columns.keys():
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, list(self.columns)).writerow(row)
        else:
            self.columns |= dict.fromkeys(row)
            self._rewrite()

    def _rewrite(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(self.columns))
        writer.writeheader()
        writer.writerows(self.history)
        write_atomically(self.path, text.getvalue())
