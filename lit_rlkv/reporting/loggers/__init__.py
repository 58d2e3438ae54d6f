"""Loggers beside the run folder: W&B, TensorBoard, or any Lightning logger."""

from typing import Any

from lightning.pytorch.loggers import Logger

from lit_rlkv.reporting.loggers.base import GuardedLogger, RunLogger, RunStart
from lit_rlkv.reporting.loggers.lightning_loggers import LightningLogger

__all__ = ["GuardedLogger", "RunLogger", "RunStart", "as_run_logger"]


def as_run_logger(built: Any) -> RunLogger:
    """Return a configured logger as a RunLogger.

    Raises:
        TypeError: it is neither a RunLogger nor a Lightning logger.
    """
    if isinstance(built, RunLogger):
        return built
    if isinstance(built, Logger):
        return LightningLogger(built)
    raise TypeError(f"logger must be a RunLogger or a Lightning logger, got {type(built).__name__}")
