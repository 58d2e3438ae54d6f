"""Run one random case in a fork with bounds on time and memory, and say how it ended."""

import os
import pickle
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from tests.tiers import slow

PROFILE = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)
LIMIT_S = 10.0
MEMORY = 1 << 30
"""Bytes that a case may reserve beyond what the tests themselves have."""
LONGEST_ERROR = 5000


def cases(short: int, many: int) -> pytest.MarkDecorator:
    """Parametrize a test with `n_cases`: a few that are always the same, and in the slow tier many others."""
    return pytest.mark.parametrize("n_cases", [short, slow(many)])


def run_cases(
    n_cases: int, check: Callable[..., object], n_fixed: int = 50, **strategies: SearchStrategy[Any]
) -> None:
    """Check random cases; up to `n_fixed` are the same in every run."""

    def check_one(**case: Any) -> None:
        check(**case)

    settings(PROFILE, max_examples=n_cases, derandomize=n_cases <= n_fixed)(given(**strategies)(check_one))()


@dataclass(frozen=True)
class Outcome:
    """How a case ended: with a value, or with an error."""

    value: Any = None
    error: str = ""
    kinds: tuple[str, ...] = ()
    """Names of the error's class and of the classes above it."""
    trace: str = ""

    def check_one_line(self, *kinds: str) -> None:
        """Fail unless the case ended well, or in a short line of one of these kinds of errors."""
        if not self.kinds:
            return
        assert set(kinds) & set(self.kinds), self.trace
        assert self.error.strip(), self.trace
        assert "\n" not in self.error, self.error
        assert len(self.error) < LONGEST_ERROR, self.error[:LONGEST_ERROR]


def outcome_of(call: Callable[[], Any], *, limit_s: float = LIMIT_S, memory: int = MEMORY) -> Outcome:
    """Return what a call gave or raised in a fork; its value must be one that pickle takes.

    Raises:
        AssertionError: it took too long, or its process died.
    """
    theirs, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        _answer(call, ours, memory)
    os.close(ours)
    written, ends_at = bytearray(), time.monotonic() + limit_s
    try:
        while select.select([theirs], [], [], max(0.0, ends_at - time.monotonic()))[0]:
            data = os.read(theirs, 1 << 20)
            if not data:
                break
            written += data
        else:
            raise AssertionError(f"no end within {limit_s:g} seconds")
    finally:
        os.close(theirs)
        os.killpg(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    assert written, f"the process died with status {status}"
    return pickle.loads(bytes(written))


def _answer(call: Callable[[], Any], ours: int, memory: int) -> None:
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (_reserved() + memory,) * 2)
        try:
            found = Outcome(call())
        except BaseException as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            found = Outcome(error=str(error), kinds=kinds, trace=traceback.format_exc()[-LONGEST_ERROR:])
        with os.fdopen(ours, "wb") as file:
            file.write(pickle.dumps(found))
    finally:
        os._exit(0)


def _reserved() -> int:
    """Bytes of address space of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
