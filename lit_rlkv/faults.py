"""Interruptions of a run: non-finite gradients, and signals that ask it to stop."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import cast

import torch
from lightning.fabric import Fabric
from torch import Tensor

MAX_SKIPPED = 5
"""Optimizer steps in a row that may be left out; from then on it is no accident."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1) if hasattr(signal, "SIGUSR1") else (signal.SIGTERM,)
"""Signals that schedulers send before they kill a job."""
EXIT_CODE = 75
"""Exit code of a run that a signal ended after it saved its state (EX_TEMPFAIL in sysexits.h)."""


class NonFiniteError(FloatingPointError):
    """Too many consecutive non-finite gradients."""


class InterruptedRunError(BaseException):
    """A signal asked the run to end. No `Exception`: nothing that survives failures may take it for one."""


class NonFiniteGuard:
    """Skips optimizer steps with a NaN or infinite gradient, and ends training after too many in a row."""

    def __init__(self, n_tolerated: int = MAX_SKIPPED) -> None:
        self.n_tolerated = n_tolerated
        self.n_in_a_row = 0

    def is_step_allowed(self, norm: Tensor, terms: Mapping[str, Tensor], loss_scale: float = 1.0) -> bool:
        """True if a gradient of this norm is finite; waits for the device.

        Args:
            terms: the losses and metrics of the step, to say which of them were not finite.
            loss_scale: what the loss was multiplied by before it went back. Above 1 a gradient that is not
                finite counts nothing yet: a scaler begins too high, and halves its scale each time.

        Raises:
            NonFiniteError: too many steps in a row had none.
        """
        if bool(torch.isfinite(norm)):
            self.n_in_a_row = 0
            return True
        if loss_scale > 1.0:
            return False
        self.n_in_a_row += 1
        if self.n_in_a_row > self.n_tolerated:
            raise NonFiniteError(
                f"{self.n_in_a_row} optimizer steps in a row had a gradient of norm {float(norm)}, so the "
                f"parameters no longer change; {_culprits(terms)}. Start a new run with a lower learning "
                "rate, or in float32 (fabric.precision=32-true)"
            )
        return False


def _culprits(terms: Mapping[str, Tensor]) -> str:
    bad = sorted(name for name, value in terms.items() if not bool(torch.isfinite(value).all()))
    if bad:
        return f"not finite in the last of them: {', '.join(bad)}"
    return "all losses and metrics of the last of them were finite, so it overflowed on the way back"


class Interruption:
    """A request to end, made by a signal: granted at once, or where it is held, once the state is whole."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal that came to this process; None as long as nobody asks."""
        self._agreed: int | None = None
        self._is_held = False

    @contextmanager
    def listening(self) -> Iterator["Interruption"]:
        """Catch the signals; for the main thread only. What was done with them before comes back."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self, is_held: bool = True) -> Iterator[None]:
        """A block that a signal does not break off; ask afterwards whether one came."""
        before, self._is_held = self._is_held, is_held or self._is_held
        try:
            yield
        finally:
            self._is_held = before

    @contextmanager
    def granted(self, is_granted: bool) -> Iterator[None]:
        """Inside of what is held, a block that a signal ends there and then, also one that came before it."""
        before, self._is_held = self._is_held, self._is_held and not is_granted
        try:
            if is_granted and self.signal is not None:
                self._on_signal(self.signal, None)
            yield
        finally:
            self._is_held = before

    def is_asked(self, fabric: Fabric) -> bool:
        """True if any rank has received a signal; every rank must call it inside `held`."""
        mine = self.signal
        if fabric.world_size > 1:
            sent = torch.tensor(mine or 0, device=fabric.device)
            mine = int(cast(Tensor, fabric.all_reduce(sent, reduce_op="max"))) or None
        self._agreed = mine
        return mine is not None

    def end_if_agreed(self) -> None:
        """End where the last answer of `is_asked` was yes: on all ranks, or on none.

        Raises:
            InterruptedRunError: it was.
        """
        if self._agreed is not None:
            raise InterruptedRunError(f"asked to end by {signal.Signals(self._agreed).name}")

    def end_if_asked(self, fabric: Fabric) -> None:
        """End where any rank was asked to by now; all of them must call this together, held.

        Raises:
            InterruptedRunError: one was.
        """
        self.is_asked(fabric)
        self.end_if_agreed()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if not self._is_held:
            self._agreed = number
            self.end_if_agreed()
