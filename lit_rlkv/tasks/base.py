"""Task: the interface of tasks, the base of tasks over a user's rows, and helpers that tasks share."""

import itertools
import logging
import random
import string
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Generic, Protocol, TypeVar, runtime_checkable

from lit_rlkv.checks import Range
from lit_rlkv.tasks.rows import Table
from lit_rlkv.types import PreferencePair, Problem

log = logging.getLogger(__name__)
MAX_LENGTH, MAX_STEPS = 10_000, 100
"""Largest lengths of problems: of those whose text grows with the length, and of those that grow faster."""
_Row = TypeVar("_Row", Problem, PreferencePair)


@runtime_checkable
class Task(Protocol):
    """A source of problems, most with an exact verifier: see `is_verifiable`."""

    @property
    def is_verifiable(self) -> bool:
        """True if `score` verifies answers and can be a reward; preferences alone cannot."""

    def sample(self, rng: random.Random) -> Problem:
        """Return a new problem, a function of the generator's state alone."""

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the completion's final answer is exactly right, else 0.0."""

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """Return a plausible completion that scores 0.0, in the format of the solution."""


@runtime_checkable
class FiniteTask(Task, Protocol):
    """A task with a fixed list of problems, visited epoch by epoch instead of sampled."""

    def __len__(self) -> int: ...

    def at(self, index: int) -> Problem:
        """Return the problem at an index of the list."""


@runtime_checkable
class UserTask(FiniteTask, Protocol):
    """A finite task from rows of a user's data."""

    @property
    def n_held_out(self) -> int:
        """Number of problems at the end of the list for evaluation alone; with 0 their prompts decide."""

    @property
    def digest(self) -> str | None:
        """Digest of the rows; None if they are generated."""

    def place(self, index: int) -> str:
        """Return the file and line, or the dataset and row, of a problem for messages."""

    def rejected(self, index: int) -> str:
        """Return the side that a row ranks below its solution; empty if it has none."""


class ListedTask(ABC, Generic[_Row]):
    """A `UserTask` over the rows of a table, and perhaps of a second one that is held out for evaluation.

    Rows with a held-out prompt are left out, with a warning that says how many.
    """

    def __init__(self, table: Table[_Row], held_out: Table[_Row] | None = None) -> None:
        if not table.rows:
            raise ValueError(f"{table.source!r} must hold rows to train on, got none")
        self.source = table.source
        """File or dataset of the rows, for messages."""
        self.n_held_out = 0 if held_out is None else len(held_out.rows)
        self._table: Table[_Row] = table if held_out is None else _with_held_out(table, held_out)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r})"

    def __len__(self) -> int:
        return len(self._table.rows)

    @abstractmethod
    def at(self, index: int) -> Problem:
        """Return the problem of a row, counted from 0 without blank lines; held-out rows come last."""

    def place(self, index: int) -> str:
        return self._table.places[index]

    @property
    def digest(self) -> str | None:
        return self._table.digest

    def rejected(self, index: int) -> str:
        return ""

    def sample(self, rng: random.Random) -> Problem:
        """Return the problem of any row that is not held out."""
        return self.at(rng.randrange(len(self) - self.n_held_out))


def _with_held_out(table: Table[_Row], held_out: Table[_Row]) -> Table[_Row]:
    prompts = {row.prompt for row in held_out.rows}
    kept = [index for index, row in enumerate(table.rows) if row.prompt not in prompts]
    n_shared = len(table.rows) - len(kept)
    if n_shared > 0:
        log.warning("%d rows of %s are also held out; they are not trained on", n_shared, table.source)
    if not kept:
        raise ValueError(f"every row of {table.source!r} is also held out; give another eval_split")
    return Table(
        table.source,
        [table.rows[index] for index in kept] + held_out.rows,
        [table.places[index] for index in kept] + held_out.places,
        f"{table.digest}+{held_out.digest}",
    )


def check_whole_numbers(task: object, **ranges: Range) -> None:
    """Raise a ValueError unless the settings of a task are whole numbers inside their ranges."""
    for name, bounds in ranges.items():
        bounds.check(name, getattr(task, name), int)


@lru_cache(maxsize=8)
def lowercase_names(n_names: int) -> tuple[str, ...]:
    """Return all lowercase names of the shortest width that gives at least `n_names` of them."""
    width = next(width for width in itertools.count(1) if len(string.ascii_lowercase) ** width >= n_names)
    return tuple("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=width))


def change_one_character(text: str, rng: random.Random) -> str:
    """Return the text with one digit changed; without digits one letter, without letters a digit appended."""
    kinds = (string.digits, string.ascii_letters)
    places = next((found for kind in kinds if (found := [i for i, c in enumerate(text) if c in kind])), None)
    if places is None:
        return text + rng.choice(string.digits)
    place = rng.choice(places)
    alphabet = string.digits if text[place] in string.digits else string.ascii_lowercase
    replacement = rng.choice([c for c in alphabet if c != text[place].lower()])
    return text[:place] + replacement + text[place + 1 :]


def shortest_solution(answer: str, answer_after: str | None) -> str:
    """Return the shortest completion with this final answer."""
    return answer if answer_after is None else f"{answer_after} {answer}"


def corrupt_final_answer(problem: Problem, rng: random.Random) -> str:
    """Return the solution with one character changed in the last occurrence of its answer."""
    before, _, after = problem.solution.rpartition(problem.answer)
    return before + change_one_character(problem.answer, rng) + after
