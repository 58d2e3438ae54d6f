"""Adding a chain of numbers, with the running totals as scratchpad."""

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lit_rlkv.tasks.base import SLIPS, slip
from lit_rlkv.types import Problem

_TOTALS = re.compile(r"([0-9]+,)*[0-9]+")


@dataclass(frozen=True)
class ChainSum:
    """`7+3+5=` is solved by `7,10,15`; only the last total is scored.

    Raises:
        ValueError: fewer than two numbers, no operand to draw, or slips of 0, or none above 0.
    """

    is_verifiable = True
    n_terms: int = 5
    """Length: how many numbers are added."""
    max_operand: int = 9
    """Difficulty: operands are drawn from 1 to this."""
    slips: Sequence[int] = SLIPS
    """By how much a corrupted solution may be off."""

    def __post_init__(self) -> None:
        if self.n_terms < 2:
            raise ValueError(f"n_terms={self.n_terms} leaves nothing to add; give at least 2")
        if self.max_operand < 1:
            raise ValueError(f"max_operand={self.max_operand} is below the smallest operand; give at least 1")
        if 0 in self.slips or not any(size > 0 for size in self.slips):
            raise ValueError(
                f"slips={list(self.slips)} make no wrong solution of every right one; give sizes other than "
                "0, at least one of them positive"
            )

    def sample(self, rng: random.Random) -> Problem:
        """A new chain."""
        operands = [rng.randint(1, self.max_operand) for _ in range(self.n_terms)]
        totals = list(itertools.accumulate(operands))
        return Problem("+".join(map(str, operands)) + "=", ",".join(map(str, totals)), str(totals[-1]))

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the completion is a comma-separated list of numbers that ends in the sum."""
        is_well_formed = _TOTALS.fullmatch(completion) is not None
        return float(is_well_formed and completion.rpartition(",")[2] == problem.answer)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """The running totals with one slip of addition carried to the end."""
        totals = [int(total) for total in problem.solution.split(",")]
        return ",".join(map(str, slip(totals, rng, self.slips)))
