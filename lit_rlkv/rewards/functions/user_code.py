"""A reward function of the user's own: a Python function."""

from dataclasses import dataclass
from pathlib import Path

from lit_rlkv.rewards.functions.base import SlowFunction
from lit_rlkv.rewards.graders import Grader


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
