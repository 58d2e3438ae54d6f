"""Where a run is recorded beside its folder: W&B, TensorBoard, or any of Lightning's loggers."""

from typing import Any

from lightning.pytorch.loggers import Logger

from lit_rlkv.reporting.loggers.base import RunLogger, RunStart
from lit_rlkv.reporting.loggers.guarded import GuardedLogger
from lit_rlkv.reporting.loggers.lightning_logger import LightningLogger

__all__ = ["GuardedLogger", "RunLogger", "RunStart", "as_run_logger"]


def as_run_logger(built: Any) -> RunLogger:
    """What a config's logger is to a run.

    Raises:
        TypeError: it is no logger.
    """
    if isinstance(built, RunLogger):
        return built
    if isinstance(built, Logger):
        return LightningLogger(built)
    raise TypeError(f"logger is a {type(built).__name__}; give one of lit_rlkv's or of Lightning's loggers")
