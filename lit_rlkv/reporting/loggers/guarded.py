"""A logger that cannot stop a run: its first failure is reported, and nothing more is sent to it."""

import logging
from collections.abc import Callable
from types import TracebackType

from rich.console import Console

from lit_rlkv.reporting.loggers.base import RunLogger, RunStart

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
                "%s failed at %s and gets nothing more; the run goes on, with its metrics in metrics.csv: %s",
                type(self.logger).__name__,
                doing,
                error,
            )

    def _end_quietly(self, logger: RunLogger) -> None:
        """What it holds may still be saved; that it failed is known."""
        try:
            logger.close(is_complete=False)
        except Exception as error:
            log.debug("%s could not be ended either: %s", type(logger).__name__, error)

    def _say(self, sentence: str | None) -> None:
        if sentence is not None:
            self.console.print(sentence, markup=False, highlight=False, soft_wrap=True)
