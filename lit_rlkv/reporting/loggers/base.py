"""Interface of loggers, and a guard so that a failing logger does not stop a run."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rich.console import Console

from lit_rlkv.checks import is_count
from lit_rlkv.reporting.report import Picture
from lit_rlkv.reporting.run_metrics import AxisValues

Cell = str | float | int | None
Rows = Sequence[Sequence[Cell]]
FileKind = Literal["report", "model"]


@dataclass(frozen=True)
class RunStart:
    """A run at its start or resume."""

    run_dir: Path
    config: Mapping[str, Any]
    """The resolved config in plain types."""
    environment: Mapping[str, Any]
    resumed_at: int = 0
    """Iterations in the checkpoint that the run resumes from; 0 at its first start."""


class RunLogger(ABC):
    """Interface of a logger beside the run folder.

    The constructor only checks its arguments and raises ValueError if one is invalid. Operations that may
    fail later (network, disk, missing packages) belong in `open` and the other methods.
    """

    figures_every: int | None = None
    """Iterations between figures during training; None draws them at the end only."""
    last_iteration = 0
    """Last iteration that the logger has from before a resume; later rows are sent again."""
    keeps_tables = True
    """True if a growing table still has its rows after a resume."""

    @abstractmethod
    def open(self, start: RunStart) -> str | None:
        """Start or resume the record of a run with its config and environment.

        Returns a message for the user, or None.
        """

    @abstractmethod
    def scalars(self, metrics: Mapping[str, float | int], place: AxisValues) -> None:
        """Log scalars by name, at these axis values."""

    def table(  # noqa: B027
        self, name: str, headings: Sequence[str], rows: Rows, place: AxisValues, *, grows: bool = False
    ) -> None:
        """Log a table, or append rows to one that grows."""

    def figures(self, pictures: Sequence[Picture], place: AxisValues) -> None:  # noqa: B027
        """Log figures, each under its key; earlier figures of the same key are kept."""

    def file(self, path: Path, kind: FileKind) -> None:  # noqa: B027
        """Upload a file, or a folder with its contents."""

    @abstractmethod
    def close(self, is_complete: bool) -> str | None:
        """End the record; returns a message for the user, or None.

        Args:
            is_complete: True if the run reached its end without an error.
        """


def checked_interval(name: str, figures_every: int | None) -> int | None:
    """Return the interval between figures after checking it.

    Raises:
        ValueError: it is neither None nor a positive integer.
    """
    if figures_every is not None and not is_count(figures_every):
        raise ValueError(
            f"{name}.figures_every must be an integer of at least 1, got {figures_every}; give null for "
            "figures at the end only"
        )
    return figures_every


log = logging.getLogger(__name__)


class GuardedLogger:
    """Context manager that opens and closes a logger, and logs its errors instead of raising them.

    After an error, and if `logger` is None, nothing is sent. Errors of the run itself and Ctrl-C propagate.
    """

    def __init__(self, logger: RunLogger | None, start: RunStart, console: Console) -> None:
        self.logger = logger
        self.start = start
        self.console = console
        self.is_broken = False

    def __enter__(self) -> "GuardedLogger":
        self.send("starting", lambda logger: self._print(logger.open(self.start)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.logger is not None and self.is_broken:
            self._close_quietly(self.logger)
        self.send("ending", lambda logger: self._print(logger.close(is_complete=kind is None)))

    @property
    def figures_every(self) -> int | None:
        """Iterations between figures during training; None if the logger takes none or has failed."""
        return None if self.logger is None or self.is_broken else self.logger.figures_every

    def send(self, doing: str, action: Callable[[RunLogger], object]) -> None:
        """Call `action` with the logger, unless the logger has failed before.

        Args:
            doing: name of the action for the warning if it fails.
        """
        if self.logger is None or self.is_broken:
            return
        try:
            action(self.logger)
        except Exception as error:
            self.is_broken = True
            log.warning(
                "%s failed at %s and gets no more data; the run continues, with metrics in metrics.csv: %s",
                type(self.logger).__name__,
                doing,
                error,
            )

    def _close_quietly(self, logger: RunLogger) -> None:
        """Close a failed logger, which may still save its data."""
        try:
            logger.close(is_complete=False)
        except Exception as error:
            log.debug("%s could not be ended either: %s", type(logger).__name__, error)

    def _print(self, message: str | None) -> None:
        if message is not None:
            self.console.print(message, markup=False, highlight=False, soft_wrap=True)
