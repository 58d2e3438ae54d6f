"""Any of Lightning's loggers: config and metrics, which are all that its loggers have in common."""

from collections.abc import Mapping

from lightning.pytorch.loggers import Logger

from lit_rlkv.reporting.axes import ITERATION, Place
from lit_rlkv.reporting.loggers.base import RunLogger, RunStart


class LightningLogger(RunLogger):
    """Hands config, environment and metrics on; the step is the iteration."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def open(self, start: RunStart) -> str | None:
        self.logger.log_hyperparams({**start.config, "environment": dict(start.environment)})
        self.last_iteration = start.resumed_at
        return None

    def scalars(self, metrics: Mapping[str, float | int], place: Place) -> None:
        numbers = {name: float(value) for name, value in {**metrics, **place}.items()}
        self.logger.log_metrics(numbers, step=int(place[ITERATION]))
        self.logger.save()

    def close(self, is_complete: bool) -> str | None:
        self.logger.finalize("success" if is_complete else "failed")
        return None
