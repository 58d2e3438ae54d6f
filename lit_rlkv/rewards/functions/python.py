"""A user's own function."""

import ast
from dataclasses import dataclass
from pathlib import Path

from lit_rlkv.rewards.functions.base import SlowFunction
from lit_rlkv.rewards.graders import Grader


@dataclass(frozen=True, kw_only=True)
class PythonFunction(SlowFunction):
    """Score of a function in a Python file, run in a process of its own.

    It gets those of `completion`, `prompt`, `answer`, `solution` and the task's extra columns that it has
    parameters for, by name, or all where it takes `**others`. A chat is a list of messages. What it prints
    goes to the standard error.

    Raises:
        ValueError: there is no such file, or no such function in it.
    """

    path: str
    """As in `rewards.py:score`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        file, name = self._file_and_name()
        if not file.is_file() or not name:
            raise ValueError(f"path={self.path!r} names no function; give it as path/to/file.py:function")
        names = _names(file)
        if name not in names:
            raise ValueError(f"{file} has no {name!r}; it has {', '.join(names) or 'no functions'}")

    def open(self) -> Grader:
        file, name = self._file_and_name()
        return self.in_processes(file, name, {})

    def _file_and_name(self) -> tuple[Path, str]:
        file, _, name = self.path.rpartition(":")
        return Path(file).expanduser(), name


def _names(file: Path) -> list[str]:
    """Return the names that a Python file defines or imports at its top, without running it.

    Raises:
        ValueError: it is not Python.
    """
    try:
        body = ast.parse(file.read_bytes(), filename=str(file)).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{file} is not Python: {error}; mend it") from error
    names = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    return names
