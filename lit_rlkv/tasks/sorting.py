"""Sorting numbers, with the list after each selection as scratchpad."""

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lit_rlkv.types import Problem, prompt_text

_LISTS = re.compile(r"([0-9]+(,[0-9]+)*;)*[0-9]+(,[0-9]+)*")


@dataclass(frozen=True)
class Sorting:
    """`5,2,9,1>` is solved by `1,5,2,9;1,2,5,9;1,2,5,9`: each list moves the next smallest number forward.

    Only the last list is scored.

    Raises:
        ValueError: fewer than two numbers, or numbers that are always equal.
    """

    is_verifiable = True
    n_items: int = 4
    """Length: how many numbers are sorted."""
    max_value: int = 9
    """Difficulty: numbers are drawn from 0 to this, with repetition."""

    def __post_init__(self) -> None:
        if self.n_items < 2:
            raise ValueError(f"n_items={self.n_items} leaves nothing to sort; give at least 2")
        if self.max_value < 1:
            raise ValueError(f"max_value={self.max_value} makes all numbers equal; give at least 1")

    def sample(self, rng: random.Random) -> Problem:
        """New numbers, not all equal."""
        numbers = [rng.randint(0, self.max_value) for _ in range(self.n_items)]
        while len(set(numbers)) == 1:
            numbers = [rng.randint(0, self.max_value) for _ in range(self.n_items)]
        choices = [min] * (self.n_items - 1)
        solution = _selections(numbers, choices)
        return Problem(_join(numbers) + ">", solution, _join(sorted(numbers)))

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the completion is one or more lists of numbers and the last is the sorted one."""
        is_well_formed = _LISTS.fullmatch(completion) is not None
        return float(is_well_formed and completion.rpartition(";")[2] == problem.answer)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """The selections with the largest number once taken for the smallest, where they differ."""
        numbers = [int(number) for number in prompt_text(problem.prompt).removesuffix(">").split(",")]
        ranked = sorted(numbers)
        places = [place for place in range(len(numbers) - 1) if ranked[place] != ranked[-1]]
        mistaken = rng.choice(places)
        return _selections(numbers, [max if place == mistaken else min for place in range(len(numbers) - 1)])


def _selections(numbers: Sequence[int], choices: Iterable[Callable[[list[int]], int]]) -> str:
    done, rest, lists = [], list(numbers), []
    for choose in choices:
        done.append(choose(rest))
        rest.remove(done[-1])
        lists.append(_join([*done, *rest]))
    return ";".join(lists)


def _join(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
