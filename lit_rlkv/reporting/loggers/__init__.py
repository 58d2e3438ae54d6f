"""Loggers beside the run folder: their interface, a guard against their errors, and what a run sends them."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.config.errors import one_line
from lit_rlkv.experience.batch import Experience
from lit_rlkv.reporting.logged_samples import LoggedSample, read_samples
from lit_rlkv.reporting.pictures import Picture
from lit_rlkv.reporting.run_metrics import ITERATION, AxisValues, History, last_axis_values
from lit_rlkv.reporting.samples import Samples
from lit_rlkv.types import Rollout

log = logging.getLogger(__name__)

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

    @abstractmethod
    def open(self, start: RunStart) -> str | None:
        """Start or resume the record of a run with its config and environment.

        Returns a message for the user, or None.
        """

    @abstractmethod
    def scalars(self, metrics: Mapping[str, float | int], place: AxisValues) -> None:
        """Log scalars by name, at these axis values."""

    def table(self, name: str, headings: Sequence[str], rows: Rows, place: AxisValues) -> None:  # noqa: B027
        """Log a table; earlier tables of the same name are kept."""

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_complete = kind is None and not self.is_broken
        self._try(
            "ending", lambda logger: self._print(logger.close(is_complete))
        )  # it may still save its data

    @property
    def figures_every(self) -> int | None:
        """Iterations between figures during training; None if the logger takes none or has failed."""
        return None if self.logger is None or self.is_broken else self.logger.figures_every

    def send(self, doing: str, action: Callable[[RunLogger], object]) -> None:
        """Call `action` with the logger, unless the logger has failed before.

        Args:
            doing: name of the action for the warning if it fails.
        """
        if not self.is_broken:
            self._try(doing, action)

    def _try(self, doing: str, action: Callable[[RunLogger], object]) -> None:
        if self.logger is None:
            return
        try:
            action(self.logger)
        except Exception as error:
            if not self.is_broken:
                log.warning(
                    "%s failed at %s and gets no more data; the run continues, with its metrics.csv: %s",
                    type(self.logger).__name__,
                    doing,
                    one_line(error) or type(error).__name__,
                )
            self.is_broken = True

    def _print(self, message: str | None) -> None:
        if message is not None:
            self.console.print(message, markup=False, highlight=False, soft_wrap=True)


SAMPLE_HEADINGS = ("iteration", "prompt", "completion", "reward")
N_DRAWN = 16
"""Sequences of a rollout in the figures during training."""


class LoggingCallback(RLCallback):
    """Logs metrics, samples and figures; must come after all callbacks that add metrics.

    Args:
        history: rows of metrics.csv from before a resume; those that the logger lacks are sent again.
        draw: returns the figures of the run so far, given a rollout.
    """

    def __init__(
        self,
        logger: GuardedLogger,
        samples: Samples,
        history: History,
        draw: Callable[[Rollout], Sequence[Picture]],
    ) -> None:
        self.logger = logger
        self.samples = samples
        self.draw = draw
        self._rollout: Rollout | None = None
        """The rollout of this iteration if figures are due."""
        if history:
            logger.send("the earlier iterations", lambda logger: self._send_earlier(logger, history))

    def on_rollout_end(self, experience: Experience) -> None:
        every = self.logger.figures_every
        is_due = every is not None and (experience.iteration + 1) % every == 0
        self._rollout = experience.rollout.rows(slice(N_DRAWN)).to("cpu") if is_due else None

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        row, rollout = {**metrics, ITERATION: float(iteration)}, self._rollout
        self._rollout = None
        self.logger.send("an iteration", lambda logger: self._record(logger, row, rollout))

    def _send_earlier(self, logger: RunLogger, history: History) -> None:
        samples = read_samples(self.samples.path)
        for row in history:
            _send_row(logger, row, samples)

    def _record(self, logger: RunLogger, row: Mapping[str, float | int], rollout: Rollout | None) -> None:
        if _send_row(logger, row, self.samples.latest) and rollout is not None:
            logger.figures(self.draw(rollout), last_axis_values([row]))


def _send_row(logger: RunLogger, row: Mapping[str, float | int], samples: Sequence[LoggedSample]) -> bool:
    """Send an iteration with its own samples; False if the logger has it from before a resume."""
    place = last_axis_values([row])
    if place[ITERATION] <= logger.last_iteration:
        return False
    logger.scalars(row, place)
    own = [sample for sample in samples if sample.iteration == place[ITERATION]]
    if own:
        rows: Rows = [[sample.iteration, sample.prompt, sample.completion, sample.reward] for sample in own]
        logger.table("samples", SAMPLE_HEADINGS, rows, place)
    return True
