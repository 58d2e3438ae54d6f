"""Following one variable through a chain of assignments among chains that do not matter."""

import itertools
import random
import re
from dataclasses import dataclass

from lit_rlkv.tasks.base import names, slip
from lit_rlkv.types import Problem

_ASSIGNMENTS = re.compile(r"([a-z]+=[0-9]+;)*[a-z]+=[0-9]+")


@dataclass(frozen=True)
class Variables:
    """`a=3;x=5;b=a;c=b+2;y=x+1;c?` is solved by `a=3;b=3;c=5`; only the last assignment is scored.

    Raises:
        ValueError: no assignment, no chain, or no operand to draw.
    """

    is_verifiable = True
    n_steps: int = 3
    """Length: assignments in each chain."""
    n_chains: int = 2
    """Difficulty: interleaved chains, of which one is asked about."""
    max_operand: int = 9
    """Largest starting value and largest increment."""

    def __post_init__(self) -> None:
        if self.n_steps < 1:
            raise ValueError(f"n_steps={self.n_steps} leaves no assignment to follow; give at least 1")
        if self.n_chains < 1:
            raise ValueError(f"n_chains={self.n_chains} leaves no chain to ask about; give at least 1")
        if self.max_operand < 1:
            raise ValueError(f"max_operand={self.max_operand} leaves no increment; give at least 1")

    def sample(self, rng: random.Random) -> Problem:
        """New chains in a random interleaving that keeps the order within each."""
        n_variables = self.n_steps * self.n_chains
        variables = rng.sample(names(n_variables), n_variables)
        chains = [
            _chain(variables[first :: self.n_chains], self.max_operand, rng) for first in range(self.n_chains)
        ]
        # Each chain's iterator is listed once per statement, so shuffling keeps the order within a chain.
        turns = [turn for statements, _ in chains for turn in [iter(statements)] * self.n_steps]
        rng.shuffle(turns)
        walk = rng.choice(chains)[1]
        asked = walk[-1].partition("=")[0]
        return Problem("".join(f"{next(turn)};" for turn in turns) + f"{asked}?", ";".join(walk), walk[-1])

    def score(self, problem: Problem, completion: str) -> float:
        """1.0 if the completion is a list of assignments and the last is the right one."""
        is_well_formed = _ASSIGNMENTS.fullmatch(completion) is not None
        return float(is_well_formed and completion.rpartition(";")[2] == problem.answer)

    def corrupt(self, problem: Problem, rng: random.Random) -> str:
        """The walk along the chain with one slip of arithmetic carried to the end."""
        walk = [assignment.split("=") for assignment in problem.solution.split(";")]
        values = slip([int(value) for _, value in walk], rng)
        return ";".join(f"{name}={value}" for (name, _), value in zip(walk, values, strict=True))


def _chain(variables: list[str], max_operand: int, rng: random.Random) -> tuple[list[str], list[str]]:
    """One chain as the prompt states it, and as the solution evaluates it; half of the links only copy."""
    value = rng.randint(0, max_operand)
    statements, walk = [f"{variables[0]}={value}"], [f"{variables[0]}={value}"]
    for previous, variable in itertools.pairwise(variables):
        increment = rng.choice((0, rng.randint(1, max_operand)))
        value += increment
        statements.append(f"{variable}={previous}" + (f"+{increment}" if increment else ""))
        walk.append(f"{variable}={value}")
    return statements, walk
