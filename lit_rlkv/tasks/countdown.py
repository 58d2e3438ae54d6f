"""Reaching a target number from given numbers, one checked step of arithmetic at a time."""

import itertools
import operator
import random
import re
from collections import Counter
from dataclasses import dataclass

from lit_rlkv.types import Problem, prompt_text

_STEP = re.compile(r"([0-9]+)([-+*])([0-9]+)=([0-9]+)")
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class Countdown:
    """`25,4,3>63:` is solved by `25-4=21,21*3=63`; any way counts that uses no number or result twice.

    Raises:
        ValueError: fewer than two numbers, no number to draw, or a target too small for a sum of two of them.
    """

    is_verifiable = True
    n_numbers: int = 3
    """Length: how many numbers are given; the worked solution uses them all."""
    max_number: int = 9
    """Difficulty: numbers are drawn from 1 to this."""
    max_target: int = 99
    """Largest target, and largest result on the way to it in the worked solution."""

    def __post_init__(self) -> None:
        if self.n_numbers < 2:
            raise ValueError(f"n_numbers={self.n_numbers} leaves nothing to combine; give at least 2")
        if self.max_number < 1:
            raise ValueError(f"max_number={self.max_number} is below the smallest number; give at least 1")
        if self.max_target < 2 * self.max_number:
            raise ValueError(
                f"max_target={self.max_target} is below the largest sum of two numbers, with "
                f"max_number={self.max_number}; give at least {2 * self.max_number}"
            )

    def sample(self, rng: random.Random) -> Problem:
        """New numbers and a target that is reached from them by construction."""
        steps = None
        while steps is None:
            numbers = [rng.randint(1, self.max_number) for _ in range(self.n_numbers)]
            steps = _combine(numbers, self.max_target, rng)
        target = steps[-1].partition("=")[2]
        return Problem(",".join(map(str, numbers)) + f">{target}:", ",".join(steps), target)

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if every step is true and uses numbers still on the table, and the last gives the target."""
        table = Counter(prompt_text(problem.prompt).partition(">")[0].split(","))
        result = ""
        for step in completion.split(","):
            found = _STEP.fullmatch(step)
            if found is None:
                return 0.0
            left, sign, right, result = found.groups()
            table.subtract((left, right))
            # Both operands are on the table here, so the numbers turned into int are short.
            if min(table[left], table[right]) < 0 or result != str(_OPERATIONS[sign](int(left), int(right))):
                return 0.0
            table[result] += 1
        return float(result == problem.answer)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """The worked solution with a last step that misses the target, or claims it by false arithmetic."""
        *steps, last = problem.solution.split(",")
        expression, _, target = last.partition("=")
        left, sign, right = re.split(r"([-+*])", expression)
        others = [other for other in _OPERATIONS if other != sign]
        results = {other: _OPERATIONS[other](int(left), int(right)) for other in others}
        misses = [
            f"{left}{other}{right}={result}"
            for other, result in results.items()
            if 0 <= result != int(target)
        ]
        lies = [
            f"{left}{other}{right}={target}" for other, result in results.items() if result != int(target)
        ]
        return ",".join([*steps, rng.choice(misses + lies)])


def _combine(numbers: list[int], max_result: int, rng: random.Random) -> list[str] | None:
    """Random steps that use up all numbers with results from 1 to `max_result`; None at a dead end."""
    steps, table = [], list(numbers)
    while len(table) > 1:
        moves = [
            (left, sign, right, result)
            for left, right in itertools.permutations(table, 2)
            for sign, operation in _OPERATIONS.items()
            if 0 < (result := operation(left, right)) <= max_result
        ]
        if not moves:
            return None
        left, sign, right, result = rng.choice(moves)
        steps.append(f"{left}{sign}{right}={result}")
        table.remove(left)
        table.remove(right)
        table.append(result)
    return steps
