"""A user's reward function that does one of many bad things, as the completion says.

This file imports the standard library alone.
"""

import builtins
import ctypes
import math
import os
import re
import signal
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Number:
    """A value that `float` takes, and perhaps gets no number from."""

    def __init__(self, found):
        self.found = found

    def __float__(self):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class Unshown:
    def __repr__(self):
        raise SystemExit


GOOD = {
    "one": lambda: 1,
    "half": lambda: 0.5,
    "true": lambda: True,
    "tensor": lambda: Number(2.5),
    "fraction": lambda: Fraction(1, 4),
    "largest": lambda: 1e6,
    "prints": lambda: sys.stdout.write("x" * 3_000_000) and 3,
}
EXPECTED = {
    "one": 1.0,
    "half": 0.5,
    "true": 1.0,
    "tensor": 2.5,
    "fraction": 0.25,
    "largest": 1e6,
    "prints": 3.0,
}
RETURNED = {
    "nan": math.nan, "inf": math.inf, "1e39": 1e39, "above": 1e6 + 1, "10**400": 10**400, "none": None,
    "text": "1.0", "bytes": b"1", "list": [1.0], "empty": [], "dict": {}, "complex": 1j, "class": Number,
    "decimal": Decimal("NaN"), "no float": Number("x"), "raising float": Number(ValueError("wrong shape")),
    "unshown": Unshown(), "surrogate": "\ud800", "long": "x" * 5_000_000, "generator": (x for x in [1]),
}  # fmt: skip
RAISED = {
    "error": ValueError("a\nb\x1b[31m"), "speechless": Speechless(), "long error": ValueError("x" * 10**6),
    "surrogate error": ValueError("\udcff"), "no message": ValueError(), "interrupt": KeyboardInterrupt(),
    "exit": SystemExit(0), "exit text": SystemExit("x"), "stop": StopIteration(), "memory": MemoryError(),
    "generator exit": GeneratorExit(), "group": ExceptionGroup("many", [ValueError()] * 100),
    "base": BaseException("x"),
}  # fmt: skip


def recurse(depth=0):
    return recurse(depth + 1)


def fork_and_return():
    os.fork()
    return 1


def in_thread(target, *, waits_s=0.0, is_daemon=True):
    threading.Thread(target=lambda: (time.sleep(waits_s), target()), daemon=is_daemon).start()
    return 1


def forever():
    while True:
        pass


DYING = {
    "recursion": recurse,
    "_exit": lambda: os._exit(0),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
}
HANGING = {
    "sleep": lambda: time.sleep(1000),
    "loop": forever,
    "regex": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
    "lock": lambda: ctypes.PyDLL(None).sleep(1000),
    "input": lambda: (os.read(0, 1), time.sleep(1000)),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
SPOILING = {
    "closes": lambda: os.closerange(0, 50) or 1,
    "writes": lambda: [_write(number, b"{\n7\n[1]\n") for number in range(1, 20)] and 1,
    "half a line": lambda: [_write(number, b"x" * 2_000_000) for number in range(1, 20)] and 1,
    "builtins": lambda: setattr(builtins, "float", None) or 1,
    "thread": lambda: in_thread(forever),
    "lasting thread": lambda: in_thread(lambda: time.sleep(1000), is_daemon=False),
    "locking thread": lambda: in_thread(lambda: ctypes.PyDLL(None).sleep(1000), waits_s=0.02),
    "dying thread": lambda: in_thread(lambda: os._exit(3), waits_s=0.02),
    "alarm": lambda: signal.setitimer(signal.ITIMER_REAL, 0.02) and 1,
    "forks": fork_and_return,
    "no stdout": lambda: setattr(sys, "stdout", None) or 1,
    "moves": lambda: os.chdir("/") or 1,
    "no recursion": lambda: sys.setrecursionlimit(60) or 1,
}
"""Actions after which another answer of the same process may fail."""
ACTIONS = {**GOOD, **DYING, **HANGING, **SPOILING}


def _write(number, data):
    try:
        return os.write(number, data)
    except OSError:
        return 0


def score(completion):
    action = completion.partition("|")[0]
    if action in RETURNED:
        return RETURNED[action]
    if action in RAISED:
        raise RAISED[action]
    return ACTIONS[action]()
