"""A limit of wall-clock time, asked between measurements, so that a run ends by itself and keeps its rows."""

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

    @property
    def minutes_left(self) -> float:
        """Minutes until then, at least 0."""
        if self.minutes is None:
            return float("inf")
        return max(self.minutes - (time.monotonic() - self.started_at) / 60, 0.0)
