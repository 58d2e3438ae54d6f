"""Signals that ask a run to stop: it saves its state first, on all ranks together."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import cast

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lit_rlkv.runs.context import CONFIG

SIGNALS = (signal.SIGTERM, signal.SIGUSR1) if hasattr(signal, "SIGUSR1") else (signal.SIGTERM,)
"""Signals that schedulers send before they kill a job."""
EXIT_CODE = 75
"""Exit code of a run that a signal ended after it saved its state (EX_TEMPFAIL in sysexits.h)."""
INTERRUPTED = ".interrupted"
"""File in a run that a signal ended after it had saved itself; removed when the run is resumed."""


class InterruptedRunError(BaseException):
    """A signal asked the run to end. Not an `Exception`: code that survives failures must not catch it."""


class Interruption:
    """A request by a signal to end the run, handled at once or, inside `deferred`, later."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """Signal that this process received; None if it received none."""
        self._agreed: int | None = None
        self._is_deferred = False

    @contextmanager
    def handle_signals(self) -> Iterator["Interruption"]:
        """Handle the signals inside the block; in the main thread only. Earlier handlers are restored."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self, is_deferred: bool = True) -> Iterator[None]:
        """Run a block that no signal interrupts; ask afterwards if one arrived."""
        before, self._is_deferred = self._is_deferred, is_deferred or self._is_deferred
        try:
            yield
        finally:
            self._is_deferred = before

    @contextmanager
    def immediate(self, is_immediate: bool) -> Iterator[None]:
        """Inside `deferred`, run a block that a signal ends at once, also one that arrived before."""
        before, self._is_deferred = self._is_deferred, self._is_deferred and not is_immediate
        try:
            if is_immediate and self.signal is not None:
                self._on_signal(self.signal, None)
            yield
        finally:
            self._is_deferred = before

    def is_requested(self, fabric: Fabric) -> bool:
        """True if any rank received a signal; every rank must call it inside `deferred`."""
        mine = self.signal
        if fabric.world_size > 1:
            sent = torch.tensor(mine or 0, device=fabric.device)
            mine = int(cast(Tensor, fabric.all_reduce(sent, reduce_op="max"))) or None
        self._agreed = mine
        return mine is not None

    def raise_if_agreed(self) -> None:
        """End the run if the last `is_requested` was True: on all ranks, or on none.

        Raises:
            InterruptedRunError: a signal was received.
        """
        if self._agreed is not None:
            raise InterruptedRunError(f"asked to end by {signal.Signals(self._agreed).name}")

    def raise_if_requested(self, fabric: Fabric) -> None:
        """End the run if any rank received a signal; every rank must call it inside `deferred`.

        Raises:
            InterruptedRunError: a signal was received.
        """
        self.is_requested(fabric)
        self.raise_if_agreed()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if not self._is_deferred:
            self._agreed = number
            self.raise_if_agreed()


@contextmanager
def mark_interrupted(run_dir: Path, *, is_rank_zero: bool) -> Iterator[None]:
    """Leave the file INTERRUPTED if a signal ends the block.

    The exit code does not always say so: srun returns the highest code of all ranks, also of a rank that it
    killed.
    """
    if is_rank_zero:
        (run_dir / INTERRUPTED).unlink(missing_ok=True)
    try:
        yield
    except InterruptedRunError:
        if is_rank_zero and (run_dir / CONFIG).is_file():  # otherwise there is nothing to resume
            with suppress(OSError):
                (run_dir / INTERRUPTED).touch()
        raise
