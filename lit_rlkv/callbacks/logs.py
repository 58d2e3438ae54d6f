"""Where metrics go: metrics.csv always, and a Lightning logger that may fail without stopping anything."""

import csv
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger

from lit_rlkv.callbacks.hooks import RLCallback

log = logging.getLogger(__name__)


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
        partial = self.path.with_name(f".{self.path.name}.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.columns))
            writer.writeheader()
            writer.writerows(self.history)
        os.replace(partial, self.path)


def wandb_logger(project: str, save_dir: str, offline: bool | None = None, **options: Any) -> WandbLogger:
    """Lightning's W&B logger, offline unless an account is configured; `wandb sync` uploads such a run later.

    Args:
        offline: None asks wandb whether it finds credentials.
    """
    import wandb  # here: it takes a second and patches the console, for which only its users should pay

    if offline is None:
        offline = not wandb.login(prompt=False)
    # The mode is said outright: wandb may have read the environment variable before Lightning sets it.
    mode = "offline" if offline else "online"
    return WandbLogger(project=project, save_dir=save_dir, offline=offline, mode=mode, **options)


class LoggerBridge(RLCallback):
    """Sends config and metrics to a Lightning logger; its first failure is reported and stops only this."""

    def __init__(self, logger: Any, config: Mapping[str, Any]) -> None:
        self.logger = logger
        self.config = config
        self.is_broken = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._try(lambda: self.logger.log_hyperparams(self.config))

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        self._try(lambda: self.logger.log_metrics(dict(metrics), step=iteration))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._try(lambda: self.logger.finalize("success"))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._try(lambda: self.logger.finalize("failed"))

    def _try(self, send: Callable[[], Any]) -> None:
        if self.is_broken:
            return
        try:
            send()
        except Exception as error:
            self.is_broken = True
            log.warning(
                "%s failed and gets nothing more; metrics.csv goes on: %s", type(self.logger).__name__, error
            )
