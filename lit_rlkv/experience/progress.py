"""Progress of a phase of an iteration, for callbacks."""

from collections.abc import Sequence

from lightning import Callback

from lit_rlkv.trainer import call


class PhaseProgress:
    """Counts the units of a phase, and reports them to the callbacks from the start on."""

    def __init__(self, phase: str, n_total: int, callbacks: Sequence[Callback]) -> None:
        self.phase = phase
        self.n_total = n_total
        self.callbacks = callbacks
        self.n_done = 0
        self._part = 0.0
        """Part of the current unit that is done."""
        self.advance(0)

    def advance(self, n: int) -> None:
        """Count further units."""
        self.n_done += n
        self._part = 0.0
        self._report()

    def advance_within(self, part: float) -> None:
        """Count a part of the current unit; what was counted before stays counted."""
        self._part = max(self._part, part)
        self._report()

    def _report(self) -> None:
        if self.n_total > 0:
            call(self.callbacks, "on_phase_progress", self.phase, self.n_done + self._part, self.n_total)
