"""A program that scores completions."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from lit_rlkv.rewards.functions.base import SlowFunction
from lit_rlkv.rewards.graders import Grader, Question, Refused, Threads

_SHOWN = 300
"""Characters of what a program writes that a message repeats."""


@dataclass(frozen=True, kw_only=True)
class Command(SlowFunction):
    """The number that a program writes to its standard output, started once for each completion.

    It reads one JSON object with `prompt`, `answer`, `solution`, `completion` and the task's extra columns
    from its standard input. There is no shell: nothing that a model writes becomes part of a command.
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
    """The programs under way."""

    def __init__(self, argv: list[str], timeout_s: float) -> None:
        self._argv = argv
        self._timeout_s = timeout_s
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def ask(self, question: Question) -> float:
        pipe = subprocess.PIPE
        with subprocess.Popen(
            self._argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        ) as process:
            self._processes.add(process)
            try:
                if self._is_closed:
                    raise Refused("the reward functions are closed")
                said = process.communicate(json.dumps(question).encode(), timeout=self._timeout_s)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"no answer within {self._timeout_s:g} seconds") from None
            finally:
                _kill(process)
                self._processes.discard(process)
        output, errors = said
        if process.returncode != 0:
            raise RuntimeError(f"it ended with status {process.returncode}: {_shown(errors)}")
        try:
            return float(output)
        except ValueError:
            raise ValueError(f"it wrote {_shown(output)!r}, which is no number") from None

    def close(self) -> None:
        self._is_closed = True
        for process in list(self._processes):
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a program with all that it has started."""
    if process.returncode is None:  # not waited for yet, so the number is still its own
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _shown(output: bytes) -> str:
    return output.decode(errors="replace").strip()[-_SHOWN:]
