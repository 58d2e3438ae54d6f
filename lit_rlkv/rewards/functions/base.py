"""RewardFunction: the base class of reward functions."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_rlkv.checks import Range
from lit_rlkv.rewards.graders import Grader, GraderPool, Threads
from lit_rlkv.types import Problem

MAX_TIMEOUT_S, MAX_WORKERS, MAX_RETRIES = 86_400, 4096, 100
"""Most seconds for one completion (a day), completions at a time, and further attempts."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction(ABC):
    """Scores completions, each by itself and in any order, while others are still sampled."""

    weight: float | int = 1.0
    """Weight of the score in the reward; 0 only logs the score, below 0 it is a penalty."""

    def __post_init__(self) -> None:
        Range().check("weight", self.weight)

    @abstractmethod
    def open(self) -> Grader:
        """Return a grader that runs this function, with its threads or processes."""

    def check(self, problem: Problem) -> None:
        """Raise a ValueError if completions of a problem cannot be scored."""
        return None


@dataclass(frozen=True, kw_only=True)
class SlowFunction(RewardFunction):
    """A reward function that may take long or hang, with a timeout, parallel workers and retries."""

    timeout_s: float | int = 10.0
    """Time limit for one completion; after it the reward has failed."""
    n_workers: int = 2
    """Completions that are scored at a time."""
    retries: int = 0
    """Further attempts after a failure."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Range(above=0, most=MAX_TIMEOUT_S).check("timeout_s", self.timeout_s)
        Range(least=1, most=MAX_WORKERS).check("n_workers", self.n_workers, int)
        Range(least=0, most=MAX_RETRIES).check("retries", self.retries, int)

    def open_pool(self, path: Path, function: str, options: dict[str, Any]) -> Grader:
        """Return a grader that calls a function of a Python file in processes that are killed if it hangs."""
        pool = GraderPool(str(path.resolve()), function, options, self.timeout_s)
        return Threads(pool.ask, n_workers=self.n_workers, retries=self.retries, on_close=pool.close)
