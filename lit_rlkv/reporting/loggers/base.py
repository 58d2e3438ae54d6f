"""What a run hands to its logger; each kind of logger keeps of it what it can."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_rlkv.checks import is_count
from lit_rlkv.reporting.axes import Place
from lit_rlkv.reporting.report import Picture

Cell = str | float | int | None
FileKind = Literal["report", "model"]


@dataclass(frozen=True)
class RunStart:
    """What is known of a run when it starts or goes on."""

    run_dir: Path
    config: Mapping[str, Any]
    """Resolved, in plain types."""
    environment: Mapping[str, Any]
    resumed_at: int = 0
    """Iterations that the checkpoint holds from which the run goes on; 0 at its first start."""


class RunLogger(ABC):
    """A place beside the run folder where a run is recorded.

    A constructor looks at its arguments only and raises ValueError for those that cannot be meant; what may
    fail (a network, a disk, a package) is for `open` and what comes after it.
    """

    figures_every: int | None = None
    """Iterations between figures during training; None draws them at the end only."""
    last_iteration = 0
    """The last iteration that it holds from before a resume: what came after it is handed over once more, and
    what is done again up to it is not."""
    keeps_tables = True
    """Whether the rows that grew a table before a resume are still in it."""

    @abstractmethod
    def open(self, start: RunStart) -> str | None:
        """Begin the record of a run, or go on with it, and note its config and environment.

        Returns what the user should know of it.
        """

    @abstractmethod
    def scalars(self, metrics: Mapping[str, float | int], place: Place) -> None:
        """Numbers by name, at their place on the axes."""

    def table(  # noqa: B027
        self,
        name: str,
        headings: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        place: Place,
        *,
        grows: bool = False,
    ) -> None:
        """A table as a whole, or more rows of one that grows."""

    def figures(self, pictures: Sequence[Picture], place: Place) -> None:  # noqa: B027
        """Pictures, each under its name; a later one stands beside the earlier one of that name."""

    def file(self, path: Path, kind: FileKind) -> None:  # noqa: B027
        """A file, or a folder with all that it holds."""

    @abstractmethod
    def close(self, is_complete: bool) -> str | None:
        """End the record; returns what the user should know of it.

        Args:
            is_complete: the run came to its end, and was not cut short by an error.
        """


def checked_interval(name: str, figures_every: int | None) -> int | None:
    """The interval between figures.

    Raises:
        ValueError: it is none.
    """
    if figures_every is None:
        return None
    if not is_count(figures_every):
        raise ValueError(
            f"{name}.figures_every={figures_every} is no interval; give a whole number of iterations, or "
            "null for figures at the end only"
        )
    return figures_every
