"""RewardFunction: the base class of reward functions."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_rlkv.checks import is_count
from lit_rlkv.rewards.graders import Grader, GraderPool, Threads
from lit_rlkv.types import Problem


@dataclass(frozen=True, kw_only=True)
class RewardFunction(ABC):
    """A score of completions, and how much it counts.

    Raises:
        ValueError: settings that cannot work.
    """

    weight: float | int = 1.0
    """In the reward; 0 logs the score alone, and below 0 it is a penalty."""

    def __post_init__(self) -> None:
        if not isinstance(self.weight, int | float) or not math.isfinite(self.weight):
            raise ValueError(f"weight={self.weight} is no weight; give a finite number")

    @abstractmethod
    def open(self) -> Grader:
        """Return a grader that runs this function, with its threads or processes."""

    def check(self, problem: Problem) -> None:
        """Refuse a problem that no completion could be scored for.

        Raises:
            ValueError: why.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class SlowFunction(RewardFunction):
    """A function that may take its time, or for ever.

    Raises:
        ValueError: no time to answer, or a number of workers or retries that cannot be.
    """

    timeout_s: float | int = 10.0
    """For one completion; then its reward has failed."""
    n_workers: int = 2
    """Completions that are scored at a time."""
    retries: int = 0
    """How often a failure is tried again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s} gives no time to answer; give seconds above 0")
        for name, least in {"n_workers": 1, "retries": 0}.items():
            value = getattr(self, name)
            if not is_count(value, least):
                raise ValueError(f"{name}={value} is no such count; give a whole number of at least {least}")

    def in_processes(self, path: Path, function: str, options: dict[str, Any]) -> Grader:
        """A function of a Python file, in processes that are killed where it hangs."""
        children = GraderPool(str(path.resolve()), function, options, self.timeout_s)
        return Threads(children.ask, n_workers=self.n_workers, retries=self.retries, on_close=children.close)
