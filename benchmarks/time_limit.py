"""A limit of wall-clock time, asked between measurements, so that a run ends by itself and keeps its rows."""

import argparse
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TimeLimit:
    """A number of minutes from now; None has no end."""

    minutes: float | None = None
    started_at: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """True once the minutes have passed."""
        return self.minutes is not None and time.monotonic() >= self.started_at + 60 * self.minutes


def add_restart_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that a restart continues."""
    parser.add_argument("--minutes", type=float, help="stop after this time; a restart measures the rest")
    parser.add_argument("--again", action="store_true", help="measure what is in the record already, too")
