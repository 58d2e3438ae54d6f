"""Reward functions that run a user's own code: a Python function or a program."""

import ast
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO, cast

from lit_rlkv.rewards.functions.base import SlowFunction
from lit_rlkv.rewards.graders import MAX_BYTES, Grader, NonRetryableError, Question, Threads
from lit_rlkv.rewards.isolated import SUPERVISOR

_MAX_SHOWN = 200
"""Characters of a program's output that an error message repeats; fewer than MAX_ERROR_LENGTH."""


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
        names = _names(file)
        if name not in names:
            raise ValueError(f"{file} has no {name!r}; it has {', '.join(names) or 'no functions'}")

    def open(self) -> Grader:
        return self.open_pool(*self._file_and_name(), {})

    def _file_and_name(self) -> tuple[Path, str]:
        file, _, name = self.path.rpartition(":")
        return Path(file).expanduser(), name


def _names(file: Path) -> list[str]:
    """Return the names that a Python file defines or imports at its top, without running it."""
    try:
        body = ast.parse(file.read_bytes(), filename=str(file)).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{file} must be Python, got {error}; fix it") from error
    names = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    return names


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
        program = self.argv[0]
        if shutil.which(program) is None:
            if os.access(program, os.X_OK) and Path(program).is_file():
                raise ValueError(f"argv: {program!r} is not in PATH; write ./{program}")
            if Path(program).is_file():
                raise ValueError(
                    f"argv: {program!r} is not executable; chmod +x it, or begin with its interpreter, as "
                    "in [python, score.py]"
                )
            raise ValueError(f"argv: there is no program {program!r}; give its path or install it")

    def open(self) -> Grader:
        programs = _Programs(list(self.argv), float(self.timeout_s))
        return Threads(programs.ask, n_workers=self.n_workers, retries=self.retries, on_close=programs.close)


class _Programs:
    """Running programs, each with a pipe that ends it when the pipe is closed or this process ends."""

    def __init__(self, argv: list[str], timeout_s: float) -> None:
        self._argv = argv
        self._timeout_s = timeout_s
        self._lifelines: set[FileIO] = set()
        self._is_closed = False

    def ask(self, question: Question) -> float:
        theirs, ours = os.pipe()
        with FileIO(theirs) as end, FileIO(ours, "w") as lifeline:
            self._lifelines.add(lifeline)
            try:
                if self._is_closed:
                    raise NonRetryableError("the reward functions are closed")
                status, output, errors = self._run(question, end, lifeline)
            finally:
                self._lifelines.discard(lifeline)
        if status != 0:
            raise RuntimeError(f"the program ended with status {status}: {_shown(errors)}")
        try:
            return float(output)
        except ValueError:
            raise ValueError(f"the program must write a number, got {_shown(output)!r}") from None

    def _run(self, question: Question, end: FileIO, lifeline: FileIO) -> tuple[int, bytes, bytes]:
        """Return status, output and errors of one run of the program."""
        pipe = subprocess.PIPE
        # -I and -S: the supervisor needs only the standard library and starts fast.
        with subprocess.Popen(
            [sys.executable, "-I", "-S", str(SUPERVISOR), str(end.fileno()), *self._argv],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            pass_fds=[end.fileno()],
            start_new_session=True,
        ) as process:
            try:
                output, errors = _communicate(process, json.dumps(question).encode(), self._timeout_s)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"no answer within {self._timeout_s:g} seconds") from None
            finally:
                lifeline.close()  # before the wait for the process, which ends with it
        return process.returncode, output, errors

    def close(self) -> None:
        self._is_closed = True
        for lifeline in list(self._lifelines):
            lifeline.close()


def _communicate(
    process: "subprocess.Popen[bytes]", question: bytes, timeout_s: float
) -> tuple[bytes, bytes]:
    """Return output and errors of a process, as `Popen.communicate` does, which reads without a bound.

    Raises:
        NonRetryableError: the process has written more than MAX_BYTES to one of them.
        TimeoutExpired: it has not ended in time.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    deadline, unsent = time.monotonic() + timeout_s, memoryview(question)
    found = {process.stdout: bytearray(), process.stderr: bytearray()}
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        for pipe in found:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(process.args, timeout_s)
            for key, _ in ready:
                pipe = cast(IO[bytes], key.fileobj)
                if pipe is process.stdin:
                    try:
                        unsent = unsent[os.write(key.fd, unsent) :]
                    except BrokenPipeError:  # the program does not read its question
                        unsent = unsent[:0]
                    is_done = not unsent
                else:
                    data = os.read(key.fd, MAX_BYTES)
                    found[pipe] += data
                    is_done = not data
                if len(found.get(pipe, b"")) > MAX_BYTES:
                    raise NonRetryableError(f"the program must write at most {MAX_BYTES} bytes")
                if is_done:
                    selector.unregister(pipe)
                    pipe.close()
    process.wait(max(0.0, deadline - time.monotonic()))
    return bytes(found[process.stdout]), bytes(found[process.stderr])


def _shown(output: bytes) -> str:
    return output.decode(errors="replace").strip()[-_MAX_SHOWN:]
