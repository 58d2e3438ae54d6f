"""Reward functions that run a user's own code: a Python function or a program."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import SHUT_RDWR, socket, socketpair
from tempfile import TemporaryFile
from typing import IO

from lit_rlkv.rewards.functions.base import SlowFunction
from lit_rlkv.rewards.graders import MAX_BYTES, Grader, NonRetryableError, Question, Threads
from lit_rlkv.rewards.isolated import SUPERVISOR

_MAX_SHOWN = 200
"""Characters of a program's output that an error message repeats; fewer than MAX_ERROR_LENGTH."""
_LOOK_S = 0.05
"""Seconds between two looks at the size of a program's output."""


@dataclass(frozen=True, kw_only=True)
class PythonFunction(SlowFunction):
    """Score of a function in a Python file, run in a process of its own.

    The function gets those of `completion`, `prompt`, `answer`, `solution` and the task's extra columns that
    it has parameters for, by name, or all with `**others`. A chat is a list of messages. What it prints goes
    to the standard error.
    """

    path: str
    """FILE:FUNCTION, as in `rewards.py:score`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        file, name = self._file_and_name()
        if not name or file == Path():
            raise ValueError(f"path must name a function as path/to/file.py:function, got {self.path!r}")
        if not file.is_file():
            raise ValueError(f"path={self.path}: there is no file {str(file)!r}; give its path")

    def open(self) -> Grader:
        return self.open_pool(*self._file_and_name(), {})

    def _file_and_name(self) -> tuple[Path, str]:
        file, _, name = self.path.rpartition(":")
        return Path(file).expanduser(), name


@dataclass(frozen=True, kw_only=True)
class Command(SlowFunction):
    """The number that a program writes to its standard output, started once for each completion.

    It reads one JSON object with `prompt`, `answer`, `solution`, `completion` and the task's extra columns
    from its standard input. There is no shell, so no text of a model becomes part of a command. The program
    and what it starts, except in a session of its own, end with the run, also if the run is killed. They end,
    and the reward has failed, once more than 1 MiB is on its standard output or on its standard error.
    """

    argv: Sequence[str]
    """The program and its arguments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_list = not isinstance(self.argv, str) and len(self.argv) > 0
        if not is_list or not all(isinstance(argument, str) for argument in self.argv):
            raise ValueError(
                f"argv must be a list of a program and its arguments, got {self.argv!r}; write it as "
                "[python, score.py], because no shell splits a line"
            )
        if shutil.which(self.argv[0]) is None:
            raise ValueError(
                f"argv: there is no executable program {self.argv[0]!r} in PATH; give its path, such as "
                "./score.sh, and chmod +x it, or begin with its interpreter, as in [python, score.py]"
            )

    def open(self) -> Grader:
        programs = _Programs(list(self.argv), float(self.timeout_s))
        return Threads(programs.ask, n_workers=self.n_workers, retries=self.retries, on_close=programs.close)


class _Programs:
    """Running programs, each with a socket that ends it when the socket is closed or this process ends."""

    def __init__(self, argv: list[str], timeout_s: float) -> None:
        self._argv = argv
        self._timeout_s = timeout_s
        self._lifelines: set[socket] = set()
        self._is_closed = False

    def ask(self, question: Question) -> float:
        ours, theirs = socketpair()
        with ours, theirs:
            self._lifelines.add(ours)
            try:
                if self._is_closed:
                    raise NonRetryableError("the reward functions are closed")
                status, output, errors = self._run(question, ours, theirs)
            finally:
                self._lifelines.discard(ours)
        if status != 0:
            raise RuntimeError(f"the program ended with status {status}: {_shown(errors)}")
        try:
            return float(output)
        except ValueError:
            raise ValueError(f"the program must write a number, got {_shown(output)!r}") from None

    def _run(self, question: Question, ours: socket, theirs: socket) -> tuple[int, bytes, bytes]:
        """Return status, output and errors of one run of the program.

        They are files, not pipes: nothing waits for a program that does not read, or for one in the
        background that keeps the output open.
        """
        with TemporaryFile() as asked, TemporaryFile() as output, TemporaryFile() as errors:
            asked.write(json.dumps(question).encode())
            asked.seek(0)
            # -I and -S: the supervisor needs only the standard library and starts fast.
            with subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), str(theirs.fileno()), *self._argv],
                stdin=asked,
                stdout=output,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            ) as process:
                theirs.close()
                try:
                    self._wait(ours, (output, errors))
                finally:
                    ours.close()  # before the wait for the process, which ends with it
            output.seek(0)
            errors.seek(0)
            return process.returncode, output.read(), errors.read()

    def _wait(self, lifeline: socket, written: Sequence[IO[bytes]]) -> None:
        """Wait until the other end closes; raise an error at the time limit, or after more than MAX_BYTES."""
        deadline = time.monotonic() + self._timeout_s
        is_running = True
        while is_running:
            lifeline.settimeout(_LOOK_S)
            with suppress(TimeoutError):
                is_running = lifeline.recv(1) != b""
            if any(os.fstat(file.fileno()).st_size > MAX_BYTES for file in written):
                raise NonRetryableError(f"the program must write at most {MAX_BYTES} bytes")
            if is_running and time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {self._timeout_s:g} seconds")

    def close(self) -> None:
        self._is_closed = True
        for lifeline in list(self._lifelines):
            with suppress(OSError):  # it has just ended
                lifeline.shutdown(SHUT_RDWR)


def _shown(output: bytes) -> str:
    return output.decode(errors="replace").strip()[-_MAX_SHOWN:]
