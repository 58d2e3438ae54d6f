"""Ctrl-C at a moment that suits: not between starting a process and writing down that it runs."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """In this block an interrupt or a termination waits for the next call of the function that it yields.

    The function then raises KeyboardInterrupt. A second signal does not wait.
    """
    came: list[int] = []

    def hold(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    def let_through() -> None:
        if came:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, hold) for number in SIGNALS}
    try:
        yield let_through
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
