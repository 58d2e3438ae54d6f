"""Ctrl-C ends a command line with one line and exit code 130; a second one ends it at once."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells have it."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1) if hasattr(signal, "SIGUSR1") else (signal.SIGTERM,)
"""Signals that schedulers send before they kill a job."""
REQUEUE = 75
"""Exit code of a run that such a signal ended, to be started again (EX_TEMPFAIL in sysexits.h)."""
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
