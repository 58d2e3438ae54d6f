"""Native tasks of arithmetic, with a scratchpad: chain sums, products and countdown."""

import itertools
import operator
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lit_rlkv.checks import Range
from lit_rlkv.tasks.base import (
    MAX_LENGTH,
    MAX_STEPS,
    check_whole_numbers,
    corrupt_final_answer,
)
from lit_rlkv.types import Problem, prompt_text

SLIPS = (-10, -2, -1, 1, 2, 10)
"""Errors of wrong totals."""
_TOTALS = re.compile(r"([0-9]+,)*[0-9]+")
_STEP = re.compile(r"([0-9]+)([-+*])([0-9]+)=([0-9]+)")
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True)
class ChainSum:
    """`7+3+5=` is solved by `7,10,15`; only the last total is scored."""

    is_verifiable = True
    n_terms: int = 5
    """Length: number of terms."""
    max_operand: int = 9
    """Difficulty: operands are drawn from 1 to this."""
    slips: Sequence[int] = SLIPS
    """Possible errors of a corrupted solution."""

    def __post_init__(self) -> None:
        check_whole_numbers(self, n_terms=Range(least=2, most=MAX_LENGTH), max_operand=Range(least=1))
        for size in self.slips:
            Range().check("each of slips", size, int)
        if 0 in self.slips or not any(size > 0 for size in self.slips):
            raise ValueError(
                f"slips must not contain 0 and must contain a positive number, got {list(self.slips)}; give "
                "others, so that every solution has a wrong version"
            )

    def sample(self, rng: random.Random) -> Problem:
        operands = [rng.randint(1, self.max_operand) for _ in range(self.n_terms)]
        totals = list(itertools.accumulate(operands))
        return Problem("+".join(map(str, operands)) + "=", ",".join(map(str, totals)), str(totals[-1]))

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the completion is a comma-separated list of numbers that ends in the sum."""
        is_well_formed = _TOTALS.fullmatch(completion) is not None
        return float(is_well_formed and completion.rpartition(",")[2] == problem.answer)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """Return the running totals with one slip of addition carried to the end."""
        totals = [int(total) for total in problem.solution.split(",")]
        start = rng.randrange(len(totals))
        smallest = min(totals[start:])
        error = rng.choice([size for size in self.slips if smallest + size >= 0])
        return ",".join(map(str, [*totals[:start], *(total + error for total in totals[start:])]))


@dataclass(frozen=True)
class Products:
    """`12*7+3*40=` is solved with a calculator: `12*7` gives 84, `3*40` gives 120, `84+120` gives the answer.

    The products stay in the context until they are added up. Only the last turn is scored.
    """

    is_verifiable = True
    n_terms: int = 3
    """Length: number of products."""
    max_factor: int = 20
    """Difficulty: factors are drawn from 2 to this."""

    def __post_init__(self) -> None:
        check_whole_numbers(self, n_terms=Range(least=2, most=MAX_STEPS), max_factor=Range(least=2))

    def sample(self, rng: random.Random) -> Problem:
        terms = [
            (rng.randint(2, self.max_factor), rng.randint(2, self.max_factor)) for _ in range(self.n_terms)
        ]
        calls = [f"{left}*{right}" for left, right in terms]
        products = [left * right for left, right in terms]
        totals = list(itertools.accumulate(products))
        turns = [
            part for call, product in zip(calls, products, strict=True) for part in (call, f"{product}\n")
        ]
        for total, product, following in zip(totals, products[1:], totals[1:], strict=False):
            turns += [f"{total}+{product}", f"{following}\n"]
        answer = str(totals[-1])
        return Problem("+".join(calls) + "=", answer, answer, turns=tuple(turns))

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the completion is the sum."""
        return float(completion == problem.answer)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """Return a sum with one digit changed."""
        return corrupt_final_answer(problem, rng)


@dataclass(frozen=True)
class Countdown:
    """`25,4,3>63:` is solved by `25-4=21,21*3=63`, or any way that uses no number or result twice."""

    is_verifiable = True
    n_numbers: int = 3
    """Length: how many numbers are given; the worked solution uses them all."""
    max_number: int = 9
    """Difficulty: numbers are drawn from 1 to this."""
    max_target: int = 99
    """Largest target, and largest result on the way to it in the worked solution."""

    def __post_init__(self) -> None:
        check_whole_numbers(self, n_numbers=Range(least=2, most=MAX_STEPS), max_number=Range(least=1))
        check_whole_numbers(self, max_target=Range(least=2))
        if self.max_target < 2 * self.max_number:
            raise ValueError(
                f"max_target must be at least 2 * max_number = {2 * self.max_number}, the largest sum of two "
                f"numbers, got {self.max_target}"
            )

    def sample(self, rng: random.Random) -> Problem:
        """Return new numbers and a target that is reached from them by construction."""
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
        """Return the solution with a last step that misses the target, or claims it by false arithmetic."""
        *steps, last = problem.solution.split(",")
        expression, _, target = last.partition("=")
        left, sign, right = re.split(r"([-+*])", expression)
        others = [other for other in _OPERATIONS if other != sign]
        results = {other: _OPERATIONS[other](int(left), int(right)) for other in others}
        wrong = {other: result for other, result in results.items() if result != int(target)}
        misses = [f"{left}{other}{right}={result}" for other, result in wrong.items() if result >= 0]
        lies = [f"{left}{other}{right}={target}" for other in wrong]
        return ",".join([*steps, rng.choice(misses + lies)])


def _combine(numbers: list[int], max_result: int, rng: random.Random) -> list[str] | None:
    """Return random steps that use up all numbers with results from 1 to `max_result`; None at a dead end."""
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
