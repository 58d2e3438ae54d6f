"""Processes that score completions with a Python function, so that one that hangs can be killed.

Not a process pool of a library (pebble, loky, concurrent.futures): a time-out must also kill what the
function has started, a worker must end in the middle of a question when its trainer is killed, and it must
not import this package.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from lit_rlkv.rewards.graders.base import Question, Refused

WORKER = Path(__file__).parents[1] / "isolated" / "worker.py"
START_LIMIT_S = 120.0
"""Longest that a function's file may take to be imported."""
MAX_SLOW_STARTS = 2
"""In a row; then no more are waited for."""
_GRACE_S = 5.0
"""Beyond its time-out, after which a worker that nobody kills ends itself."""


class GraderPool:
    """Workers that are started when they are needed, used again, and replaced after a time-out.

    Args:
        path: of a Python file.
        function: its name there; it is called with the fields of the question that it has parameters for.
        options: further arguments of every call.
        timeout_s: for one completion.
    """

    def __init__(self, path: str, function: str, options: dict[str, Any], timeout_s: float | int) -> None:
        self._timeout_s = float(timeout_s)
        self._job = {"path": path, "function": function, "options": options, "limit_s": timeout_s + _GRACE_S}
        self._idle: deque[_Child] = deque()
        self._all: set[_Child] = set()
        self._lock = Lock()
        self._is_closed = False
        self._refusal: str | None = None
        """Why the function cannot be loaded; known once, so that no more workers are started."""
        self._n_slow_starts = 0

    def ask(self, question: Question) -> Any:
        """The function's answer, from a worker that is idle or new; may be called by several threads.

        Raises:
            Refused: the file cannot be imported or lacks the function.
            RuntimeError: the function raised, or its process died.
            TimeoutError: it took too long.
        """
        child = self._take()
        try:
            answer = child.ask(question, self._timeout_s)
        except BaseException:
            self._drop(child)
            raise
        self._idle.append(child)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["score"]

    def close(self) -> None:
        """End all workers, those in the middle of a question too."""
        with self._lock:
            self._is_closed = True
            self._idle.clear()
            children = list(self._all)
        for child in children:
            self._drop(child)

    def _take(self) -> "_Child":
        with suppress(IndexError):
            return self._idle.pop()
        if self._refusal is not None:
            raise Refused(self._refusal)
        with self._lock:
            if self._is_closed:
                raise Refused("the reward functions are closed")
            child = _Child()
            self._all.add(child)
        try:
            said = child.ask(self._job, START_LIMIT_S)
        except BaseException as error:
            self._drop(child)
            if isinstance(error, TimeoutError):
                self._count_slow_start()
            raise
        self._n_slow_starts = 0
        if "error" in said:
            self._drop(child)
            self._refusal = f"{self._job['path']} gives no {self._job['function']}: {said['error']}"
            raise Refused(self._refusal)
        return child

    def _count_slow_start(self) -> None:
        self._n_slow_starts += 1
        if self._n_slow_starts >= MAX_SLOW_STARTS:
            self._refusal = (
                f"{self._job['path']} was not loaded within {START_LIMIT_S:g} seconds, "
                f"{self._n_slow_starts} times; load less when it is imported"
            )

    def _drop(self, child: "_Child") -> None:
        child.kill()
        with self._lock:
            self._all.discard(child)


class _Child:
    """One worker, and the pipes to it."""

    def __init__(self) -> None:
        # -P: the folder of the worker is not one to import from. A session of its own: Ctrl-C is for us.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._unread = b""

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to one line.

        Raises:
            TimeoutError: there is none in time.
            RuntimeError: the process has died.
        """
        assert self._process.stdin is not None
        deadline = time.monotonic() + timeout_s
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise RuntimeError("its process has died") from error
        while b"\n" not in self._unread:
            self._unread += self._read(deadline, timeout_s)
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End the process, with what it may have started."""
        if self._process.returncode is None:  # not waited for yet, so the number is still its own
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(OSError):
            self._process.stdout.close()

    def _read(self, deadline: float, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN | select.POLLHUP)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(f"no answer within {timeout_s:g} seconds")
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:
            raise RuntimeError("its process died in the middle of a question")
        return data
