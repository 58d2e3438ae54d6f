"""Graders run a reward function: at once, in threads, or in worker processes that can be killed."""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event, Lock
from typing import IO, Any

from lit_rlkv.rewards.isolated import WORKER
from lit_rlkv.rewards.verifier import MAX_SCORE
from lit_rlkv.types import Problem

log = logging.getLogger(__name__)
BACKOFF_S = 0.5
"""Delay before the first retry; doubled before each further one."""
MAX_BACKOFF_S = 8.0
START_LIMIT_S = 120.0
"""Longest time for a worker to import the function's file."""
MAX_SLOW_STARTS = 2
"""Consecutive workers that may exceed START_LIMIT_S; then no more are started."""
MAX_BYTES = 1 << 20
"""Longest output of a worker or a service that is read."""
MAX_ERROR_LENGTH = 300
"""Characters of an error that are kept."""
_GRACE_S = 5.0
"""Time after its timeout at which a worker that was not killed ends itself."""

Question = dict[str, Any]
"""`prompt` (a text or messages), `answer`, `solution`, `completion` and the problem's extra columns."""


class NonRetryableError(Exception):
    """A failure that a retry cannot fix."""


class Grader(ABC):
    """Answers questions, perhaps several at a time and in any order."""

    @abstractmethod
    def submit(self, question: Question) -> "Future[float]":
        """Return the future of a score or an exception; each grader has its own timeout."""

    def close(self) -> None:
        """End all threads and processes; pending questions fail."""
        return None


class Immediate(Grader):
    """Calls a function that is fast, or ends in time by itself, in this process."""

    def __init__(self, score: Callable[[Question], float]) -> None:
        self._score = score

    def submit(self, question: Question) -> "Future[float]":
        future: Future[float] = Future()
        try:
            future.set_result(as_score(self._score(question)))
        except Exception as error:
            future.set_exception(_shortened(error))
        return future


class Threads(Grader):
    """Asks up to `n_workers` questions at a time and retries a failure up to `retries` times.

    Args:
        ask: raises after its timeout, and `NonRetryableError` if a retry cannot help.
        on_close: ends what `ask` may be waiting for.
    """

    def __init__(
        self,
        ask: Callable[[Question], Any],
        *,
        n_workers: int,
        retries: int = 0,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._ask = ask
        self._retries = retries
        self._on_close = on_close
        self._is_closing = Event()
        self._pool = ThreadPoolExecutor(n_workers, thread_name_prefix="reward")

    def submit(self, question: Question) -> "Future[float]":
        return self._pool.submit(self._answer, question)

    def close(self) -> None:
        self._is_closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._on_close()
        self._pool.shutdown(wait=True)

    def _answer(self, question: Question) -> float:
        backoff_s = BACKOFF_S
        for n_left in range(self._retries, -1, -1):
            try:
                return as_score(self._ask(question))
            except Exception as error:
                failure = _shortened(error)
                if n_left == 0 or isinstance(error, NonRetryableError):
                    break
            log.info("a reward function failed; the next attempt is in %g s: %s", backoff_s, failure)
            if self._is_closing.wait(backoff_s):
                break
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        raise failure  # out here, because it would keep the error as its context in there


class GraderPool:
    """Worker processes for a Python function, started on demand, reused, and killed after a timeout.

    Not a process pool of a library (pebble, loky, concurrent.futures): a timeout must also kill what the
    function has started, a worker must end in the middle of a question when its trainer is killed, and it
    must not import this package.

    Args:
        path: of a Python file.
        function: its name there; it is called with the fields of the question that it has parameters for.
        options: further arguments of every call.
        timeout_s: for one completion.
    """

    def __init__(self, path: str, function: str, options: dict[str, Any], timeout_s: float | int) -> None:
        self._timeout_s = float(timeout_s)
        self._job = {"path": path, "function": function, "options": options, "limit_s": timeout_s + _GRACE_S}
        self._idle: deque[_Worker] = deque()
        self._all: set[_Worker] = set()
        self._lock = Lock()
        self._is_closed = False
        self._load_error: str | None = None
        """Why the function cannot be loaded; once it is set, no more workers are started."""
        self._n_slow_starts = 0

    def ask(self, question: Question) -> Any:
        """Return the function's answer from an idle or a new worker; safe to call from several threads.

        Raises:
            NonRetryableError: the file cannot be imported or lacks the function.
            RuntimeError: the function raised, or its process died.
            TimeoutError: there was no answer in time.
        """
        worker = self._idle_or_new()
        try:
            answer = worker.ask(question, self._timeout_s)
        except BaseException:
            self._kill(worker)
            raise
        self._idle.append(worker)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["score"]

    def close(self) -> None:
        """End all workers, also in the middle of a question."""
        with self._lock:
            self._is_closed = True
            self._idle.clear()
            workers = list(self._all)
        for worker in workers:
            self._kill(worker)

    def _idle_or_new(self) -> "_Worker":
        with suppress(IndexError):
            return self._idle.pop()
        if self._load_error is not None:
            raise NonRetryableError(self._load_error)
        with self._lock:
            if self._is_closed:
                raise NonRetryableError("the reward functions are closed")
            worker = _Worker()
            self._all.add(worker)
        path, function = self._job["path"], self._job["function"]
        try:
            reply = worker.ask(self._job, START_LIMIT_S)
            self._n_slow_starts = 0
            if "error" in reply:
                self._load_error = f"cannot load {function} from {path}: {reply['error']}"
                raise NonRetryableError(self._load_error)
        except BaseException as error:
            self._kill(worker)
            self._n_slow_starts += isinstance(error, TimeoutError)
            if self._n_slow_starts >= MAX_SLOW_STARTS:
                self._load_error = (
                    f"{path} was not loaded within {START_LIMIT_S:g} seconds, {self._n_slow_starts} times; "
                    "load less when it is imported"
                )
            raise
        return worker

    def _kill(self, worker: "_Worker") -> None:
        worker.kill()
        with self._lock:
            self._all.discard(worker)


class _Worker:
    """A process of isolated/worker.py and the pipes to it."""

    def __init__(self) -> None:
        # -P keeps the worker's folder out of sys.path. A session of its own: Ctrl-C is for the trainer.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        # A function may leave a thread that holds the interpreter's lock, and then nobody reads.
        os.set_blocking(self._stdin.fileno(), False)
        self._unread = b""

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one JSON line and return the line that answers it."""
        deadline = time.monotonic() + timeout_s
        unsent = memoryview(json.dumps(message).encode() + b"\n")
        while unsent:
            _wait(self._stdin, select.POLLOUT, deadline, timeout_s)
            try:
                unsent = unsent[os.write(self._stdin.fileno(), unsent) :]
            except OSError as error:
                raise RuntimeError("its process has died") from error
        while b"\n" not in self._unread:
            if len(self._unread) > MAX_BYTES:
                raise RuntimeError(f"an answer must have at most {MAX_BYTES} bytes")
            self._unread += self._read(deadline, timeout_s)
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End the process and what it may have started."""
        if self._process.returncode is None:  # not waited for yet, so no other process has its id
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._stdin, self._stdout):
            with suppress(OSError):
                pipe.close()

    def _read(self, deadline: float, timeout_s: float) -> bytes:
        _wait(self._stdout, select.POLLIN | select.POLLHUP, deadline, timeout_s)
        data = os.read(self._stdout.fileno(), 1 << 16)
        if not data:
            raise RuntimeError("its process died in the middle of a question")
        return data


def _wait(pipe: IO[bytes], events: int, deadline: float, timeout_s: float) -> None:
    """Wait until a pipe is ready; raise a TimeoutError at the deadline."""
    poll = select.poll()
    poll.register(pipe, events)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError(f"no answer within {timeout_s:g} seconds")


def question_of(problem: Problem, completion: str) -> Question:
    """Return a completion and all fields of its problem, as JSON can hold them."""
    prompt = problem.prompt
    asked = prompt if isinstance(prompt, str) else [message.as_dict() for message in prompt]
    own = {"prompt": asked, "answer": problem.answer, "solution": problem.solution}
    return {**problem.extra, **own, "completion": completion}


def as_score(value: Any) -> float:
    """Return the score of a reward function as a float."""
    if not isinstance(value, int | float) or not abs(value) <= MAX_SCORE:
        raise ValueError(
            f"the score must be a finite number of size at most {MAX_SCORE:g}, got "
            f"{value!r:.{MAX_ERROR_LENGTH}}"
        )
    return float(value)


def error_text(error: BaseException) -> str:
    """Return the message of an error, shortened; with its type, if it is no Exception, as SystemExit.

    It may repeat a model's text: without control characters, no terminal obeys it.
    """
    name = type(error).__name__
    try:
        text = str(error)[:MAX_ERROR_LENGTH]
    except Exception:  # of the error's own __str__
        text = ""
    text = "".join(char if char.isprintable() else " " for char in text) or name
    return text if isinstance(error, Exception) or text == name else f"{name}: {text}"


def _shortened(error: Exception) -> RuntimeError:
    """Return an error with the first characters of the message, and nothing else that needs memory."""
    return RuntimeError(error_text(error))
