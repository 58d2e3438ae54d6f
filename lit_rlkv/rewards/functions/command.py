"""A program that scores completions."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO

from lit_rlkv.rewards.functions.base import SlowFunction
from lit_rlkv.rewards.graders import Grader, Question, Refused, Threads
from lit_rlkv.rewards.isolated import FOLDER

_SUPERVISOR = FOLDER / "supervisor.py"
_SHOWN = 300
"""Characters of what a program writes that a message repeats."""


@dataclass(frozen=True, kw_only=True)
class Command(SlowFunction):
    """The number that a program writes to its standard output, started once for each completion.

    It reads one JSON object with `prompt`, `answer`, `solution`, `completion` and the task's extra columns
    from its standard input. There is no shell: nothing that a model writes becomes part of a command. What
    it starts ends with it, and it ends with the run, also with one that is killed; what takes a session of
    its own does not.

    Raises:
        ValueError: `argv` is no list of texts, or its program is not there.
    """

    argv: Sequence[str]
    """The program and its arguments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_list = not isinstance(self.argv, str) and len(self.argv) > 0
        if not is_list or not all(isinstance(argument, str) for argument in self.argv):
            raise ValueError(
                f"argv={self.argv!r} is no list of a program and its arguments; write it as "
                "[python, score.py], there is no shell to take a line apart"
            )
        if shutil.which(self.argv[0]) is None:
            raise ValueError(f"argv: there is no program {self.argv[0]!r}; give its path, or install it")

    def open(self) -> Grader:
        running = _Running(list(self.argv), float(self.timeout_s))
        return Threads(running.ask, n_workers=self.n_workers, retries=self.retries, on_close=running.close)


class _Running:
    """The programs under way, each by the pipe that ends it when we close it or are no more."""

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
                    raise Refused("the reward functions are closed")
                status, output, errors = self._run(question, end, lifeline)
            finally:
                self._lifelines.discard(lifeline)
        if status != 0:
            raise RuntimeError(f"it ended with status {status}: {_shown(errors)}")
        try:
            return float(output)
        except ValueError:
            raise ValueError(f"it wrote {_shown(output)!r}, which is no number") from None

    def _run(self, question: Question, end: FileIO, lifeline: FileIO) -> tuple[int, bytes, bytes]:
        """Status, output and errors."""
        pipe = subprocess.PIPE
        # -I and -S: it takes the standard library alone, and starts in a moment.
        with subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SUPERVISOR), str(end.fileno()), *self._argv],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            pass_fds=[end.fileno()],
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(json.dumps(question).encode(), timeout=self._timeout_s)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"no answer within {self._timeout_s:g} seconds") from None
            finally:
                lifeline.close()  # before the process is waited for, which ends with it
        return process.returncode, output, errors

    def close(self) -> None:
        self._is_closed = True
        for lifeline in list(self._lifelines):
            lifeline.close()


def _shown(output: bytes) -> str:
    return output.decode(errors="replace").strip()[-_SHOWN:]
