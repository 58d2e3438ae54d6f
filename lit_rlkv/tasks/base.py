"""Task: the interface of tasks, and helpers that several tasks share."""

import itertools
import random
import string
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, runtime_checkable

from lit_rlkv.types import Problem

SLIPS = (-10, -2, -1, 1, 2, 10)
"""By how much wrong totals are off."""


@runtime_checkable
class Task(Protocol):
    """A supply of problems, most with an exact verifier: see `is_verifiable`."""

    @property
    def is_verifiable(self) -> bool:
        """True if `score` verifies answers and can be a reward; preferences alone cannot."""
        ...

    def sample(self, rng: random.Random) -> Problem:
        """A new problem, a function of nothing but the generator's state."""
        ...

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the completion's final answer is exactly right, else 0.0."""
        ...

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """A plausible completion that scores 0.0, in the format of the solution."""
        ...


@runtime_checkable
class FiniteTask(Task, Protocol):
    """A task with a fixed list of problems, visited epoch by epoch instead of sampled."""

    def __len__(self) -> int: ...

    def at(self, index: int) -> Problem:
        """The problem at a place in the list."""
        ...


@runtime_checkable
class UserTask(FiniteTask, Protocol):
    """A finite task from rows of a user's data."""

    @property
    def n_held_out(self) -> int:
        """How many problems, the last of the list, are for evaluation alone; 0 leaves it to their prompts."""
        ...

    @property
    def digest(self) -> str | None:
        """Tells the rows from any others; None where they are not read but made."""
        ...

    def place(self, index: int) -> str:
        """Where a problem stands in its source, for messages."""
        ...

    def rejected(self, index: int) -> str:
        """The side that a row ranks below its solution; empty where it has none."""
        ...


def slip(totals: Sequence[int], rng: random.Random, sizes: Sequence[int] = SLIPS) -> list[int]:
    """The totals with one mistake in arithmetic that is carried on to the last; none becomes negative."""
    start = rng.randrange(len(totals))
    smallest = min(totals[start:])
    error = rng.choice([size for size in sizes if smallest + size >= 0])
    return [*totals[:start], *(total + error for total in totals[start:])]


@lru_cache(maxsize=8)
def names(n_names: int) -> tuple[str, ...]:
    """Every lowercase name of the shortest width that gives at least `n_names` of them."""
    width = next(width for width in itertools.count(1) if len(string.ascii_lowercase) ** width >= n_names)
    return tuple("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=width))


def change_one_character(text: str, rng: random.Random) -> str:
    """The text with one digit replaced by another, or where it has none, one letter, or a digit appended."""
    kinds = (string.digits, string.ascii_letters)
    places = next((found for kind in kinds if (found := [i for i, c in enumerate(text) if c in kind])), None)
    if places is None:
        return text + rng.choice(string.digits)
    place = rng.choice(places)
    alphabet = string.digits if text[place] in string.digits else string.ascii_lowercase
    replacement = rng.choice([c for c in alphabet if c != text[place].lower()])
    return text[:place] + replacement + text[place + 1 :]


def solve_with(answer: str, answer_after: str | None) -> str:
    """The shortest completion with this final answer."""
    return answer if answer_after is None else f"{answer_after} {answer}"


def corrupt_final_answer(problem: Problem, rng: random.Random) -> str:
    """The solution with one character of its answer changed, where it says that last."""
    before, _, after = problem.solution.rpartition(problem.answer)
    return before + change_one_character(problem.answer, rng) + after
