"""Interface of a run's logger, and the guard that keeps its failures from stopping a run."""

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
FileKind = Literal["report", "model"]


@dataclass(frozen=True)
class RunStart:
    """A run at its start or resume."""

    run_dir: Path
    config: Mapping[str, Any]
    """Resolved, in plain types."""
    environment: Mapping[str, Any]
    resumed_at: int = 0
    """Iterations in the checkpoint that the run resumes from; 0 at its first start."""


class RunLogger(ABC):
    """A place beside the run folder where a run is recorded.

    A constructor looks at its arguments only and raises ValueError for those that cannot be meant; what may
    fail (a network, a disk, a package) is for `open` and what comes after it.
    """

    figures_every: int | None = None
    """Iterations between figures during training; None draws them at the end only."""
    last_iteration = 0
    """Last iteration that it holds from before a resume; later rows are sent again, earlier ones are not."""
    keeps_tables = True
    """True if a growing table still has its rows after a resume."""

    @abstractmethod
    def open(self, start: RunStart) -> str | None:
        """Start or resume the record of a run with its config and environment.

        Returns a message for the user, or None.
        """

    @abstractmethod
    def scalars(self, metrics: Mapping[str, float | int], place: AxisValues) -> None:
        """Numbers by name, at their place on the axes."""

    def table(  # noqa: B027
        self,
        name: str,
        headings: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        place: AxisValues,
        *,
        grows: bool = False,
    ) -> None:
        """A table as a whole, or more rows of one that grows."""

    def figures(self, pictures: Sequence[Picture], place: AxisValues) -> None:  # noqa: B027
        """Pictures, each under its name; a later one stands beside the earlier one of that name."""

    def file(self, path: Path, kind: FileKind) -> None:  # noqa: B027
        """A file, or a folder with all that it holds."""

    @abstractmethod
    def close(self, is_complete: bool) -> str | None:
        """End the record; returns a message for the user, or None.

        Args:
            is_complete: True if the run reached its end without an error.
        """


def checked_interval(name: str, figures_every: int | None) -> int | None:
    """The interval between figures.

    Raises:
        ValueError: it is not a positive whole number.
    """
    if figures_every is None:
        return None
    if not is_count(figures_every):
        raise ValueError(
            f"{name}.figures_every={figures_every} must be a whole number of iterations of at least 1, or "
            "null for figures at the end only"
        )
    return figures_every


log = logging.getLogger(__name__)


class GuardedLogger:
    """Opens a logger for the time of a `with` block; without a logger, everything is left out.

    Errors of the run itself pass through, and Ctrl-C does while the logger is at work.
    """

    def __init__(self, logger: RunLogger | None, start: RunStart, console: Console) -> None:
        self.logger = logger
        self.start = start
        self.console = console
        self.is_broken = False

    def __enter__(self) -> "GuardedLogger":
        self.send("starting", lambda logger: self._say(logger.open(self.start)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.logger is not None and self.is_broken:
            self._end_quietly(self.logger)
        self.send("ending", lambda logger: self._say(logger.close(is_complete=kind is None)))

    @property
    def figures_every(self) -> int | None:
        """Iterations between figures during training; None while nothing would take them."""
        return None if self.logger is None or self.is_broken else self.logger.figures_every

    def send(self, doing: str, action: Callable[[RunLogger], object]) -> None:
        """Let the logger do something, as long as it has not failed.

        Args:
            doing: what a warning says that it failed at.
        """
        if self.logger is None or self.is_broken:
            return
        try:
            action(self.logger)
        except Exception as error:
            self.is_broken = True
            log.warning(
                "%s failed at %s and gets nothing more; the run continues, with metrics in metrics.csv: %s",
                type(self.logger).__name__,
                doing,
                error,
            )

    def _end_quietly(self, logger: RunLogger) -> None:
        """Close a failed logger, which may still save its data."""
        try:
            logger.close(is_complete=False)
        except Exception as error:
            log.debug("%s could not be ended either: %s", type(logger).__name__, error)

    def _say(self, sentence: str | None) -> None:
        if sentence is not None:
            self.console.print(sentence, markup=False, highlight=False, soft_wrap=True)
