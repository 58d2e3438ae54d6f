"""The parts of an iteration, announced to whoever measures them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Listener = Callable[[str, int], None]
"""Is told the phase and the iteration, which counts from 0."""


class Phases:
    """`with phases("rollout", iteration):` tells its listeners when a part begins and when it is over."""

    def __init__(self, on_start: Sequence[Listener] = (), on_end: Sequence[Listener] = ()) -> None:
        self.on_start = list(on_start)
        self.on_end = list(on_end)

    @contextmanager
    def __call__(self, phase: str, iteration: int) -> Iterator[None]:
        for listener in self.on_start:
            listener(phase, iteration)
        yield
        for listener in self.on_end:
            listener(phase, iteration)
