"""Ctrl-C ends a command line in one line, a second one at once; a scheduler's signal ends a saved run."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from lightning.fabric import Fabric

EXIT_CODE = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells have it."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1) if hasattr(signal, "SIGUSR1") else (signal.SIGTERM,)
"""Signals that schedulers send before they kill a job."""
REQUEUE = 75
"""Exit code of a run that such a signal ended, to be started again (EX_TEMPFAIL in sysexits.h)."""
FINISHED = "the run is finished"
SHOW_CURSOR = "\x1b[?25h"
"""Undoes what a progress bar does to a terminal."""


def is_first_process() -> bool:
    """True in the process that speaks for all: rank 0, or the only process."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))


def say(line: str) -> None:
    """Write a line to stderr, unbuffered, from the first process; safe in a signal handler."""
    if is_first_process():
        with suppress(OSError):
            os.write(2, f"{SHOW_CURSOR if os.isatty(2) else ''}{line}\n".encode())


def end_at_once(line: str = "ended at once", code: int = EXIT_CODE) -> NoReturn:
    """End the process without any clean-up."""
    say(line)
    os._exit(code)


def ask_for_requeue(line: str) -> None:
    """End with this line and `REQUEUE` on a scheduler's signal, until another handler takes its place."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: end_at_once(line, REQUEUE))


def exit_soon(code: int) -> NoReturn:
    """Exit, and let Python skip the search for reference cycles, which takes seconds with torch loaded."""
    gc.freeze()
    sys.exit(code)


@contextmanager
def call_at_first_ctrl_c(handler: Callable[[], None]) -> Iterator[None]:
    """Call `handler` at the first Ctrl-C in the block; from then on, another one ends the process at once.

    SIGINT stays ignored where it is, as in a background job of a shell script.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda number, frame: end_at_once())
        handler()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handle:  # none came, in a block within this one neither
            signal.signal(signal.SIGINT, before)


@contextmanager
def abort_on_ctrl_c(line: str) -> Iterator[None]:
    """End the process at once, with this line, on Ctrl-C in a block that leaves nothing half-done.

    An exception in the middle of an import could be caught there, or show a traceback.
    """
    with call_at_first_ctrl_c(lambda: end_at_once(line)):
        yield


@contextmanager
def unwind_on_ctrl_c(line: str) -> Iterator[None]:
    """Leave the block by KeyboardInterrupt on Ctrl-C, so that it cleans up, and exit with this line."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    try:
        with call_at_first_ctrl_c(interrupt):
            yield
    except KeyboardInterrupt:
        say(line)
        exit_soon(EXIT_CODE)


class InterruptedRunError(BaseException):
    """A signal asked the run to end. Not an `Exception`: code that survives failures must not catch it."""

    def __init__(self, message: str, number: int = signal.SIGTERM, is_finished: bool = False) -> None:
        super().__init__(message)
        self.is_ctrl_c = number == signal.SIGINT
        """True if a person ended the run, False if a scheduler did, which starts it again."""
        self.is_finished = is_finished
        """True if nothing was left to do but to close the loggers."""


INTERRUPTS = (KeyboardInterrupt, InterruptedRunError)
"""Exceptions that signals raise; code that survives all else passes them on."""


class Interruption:
    """A request by a signal to end the run, handled at once or, inside `deferred` or `together`, later.

    Ctrl-C does not wait for the end of `deferred`: nobody wants to sit through an iteration, and what it
    loses is at most the work since the newest checkpoint.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """Signal that this process received; None if it received none."""
        self._waiting: frozenset[int] = frozenset()
        """Signals that end nothing before somebody asks for them."""
        self._agreed: int | None = None
        self._is_ending = False
        self.is_finished = False
        """True once the run has written its report: a signal then ends the process well."""

    @contextmanager
    def handle_signals(self) -> Iterator["Interruption"]:
        """Handle the signals inside the block; in the main thread only. Earlier handlers are restored."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            with call_at_first_ctrl_c(lambda: self._on_signal(signal.SIGINT, None)):
                yield self
        finally:
            for number, handler in before.items():
                ends_well = self.is_finished  # the process only has to exit
                signal.signal(number, (lambda *_: end_at_once(FINISHED, 0)) if ends_well else handler)

    @contextmanager
    def _with_waiting(self, waiting: frozenset[int]) -> Iterator[None]:
        before, self._waiting = self._waiting, waiting
        try:
            yield
        finally:
            self._waiting = before

    def deferred(self) -> AbstractContextManager[None]:
        """Run a block that no signal but Ctrl-C interrupts; ask afterwards if one arrived."""
        return self._with_waiting(self._waiting.union(SIGNALS))

    def together(self, n_ranks: int) -> AbstractContextManager[None]:
        """Run a block that no signal interrupts on one of several ranks, as the others would wait for it."""
        return self._with_waiting(self._waiting.union([signal.SIGINT, *SIGNALS] if n_ranks > 1 else []))

    @contextmanager
    def immediate(self, is_immediate: bool) -> Iterator[None]:
        """Inside `deferred`, run a block that a signal ends at once, also one that arrived before."""
        with self._with_waiting(frozenset() if is_immediate else self._waiting):
            if is_immediate and self.signal is not None:
                self._on_signal(self.signal, None)
            yield

    def is_requested(self, fabric: "Fabric") -> bool:
        """True if any rank received a signal; every rank must call it inside `deferred`."""
        self._agreed = self.signal
        if fabric.world_size > 1:
            import torch  # loaded by now; the command lines need this module before it

            sent = torch.tensor(self.signal or 0, device=fabric.device)
            self._agreed = int(torch.as_tensor(fabric.all_reduce(sent, reduce_op="max"))) or None
        return self._agreed is not None

    @property
    def is_agreed(self) -> bool:
        """True if the last call of `is_requested` returned True: all ranks are about to end."""
        return self._agreed is not None

    def raise_if_agreed(self) -> None:
        """End the run if the last `is_requested` was True: on all ranks, or on none.

        Raises:
            InterruptedRunError: a signal was received.
        """
        self._is_ending = self.is_agreed
        if self._agreed is not None:
            name = signal.Signals(self._agreed).name
            is_ctrl_c = self._agreed == signal.SIGINT
            said = "interrupted" if is_ctrl_c else f"asked to end by {name}"
            raise InterruptedRunError(said, self._agreed, self.is_finished)

    def raise_if_requested(self, fabric: "Fabric") -> None:
        """End the run if any rank received a signal; every rank must call it inside `deferred`.

        Raises:
            InterruptedRunError: a signal was received.
        """
        self.is_requested(fabric)
        self.raise_if_agreed()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_ending:  # launchers often send SIGTERM after a Ctrl-C; the first one says how it ends
            return
        self.signal = number
        if number not in self._waiting:
            self._agreed = number
            self.raise_if_agreed()
        elif number == signal.SIGINT:
            say("interrupted: all processes end with this step; Ctrl-C again ends them at once")
