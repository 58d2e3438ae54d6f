"""A reward function that a test brings along."""

from dataclasses import dataclass
from typing import Any

from lit_rlkv.rewards import RewardFunction
from lit_rlkv.rewards.graders import Threads


@dataclass(frozen=True, kw_only=True)
class InThreads(RewardFunction):
    """Any function of a question, several at a time."""

    ask: Any
    n_workers: int = 4

    def open(self):
        return Threads(self.ask, n_workers=self.n_workers)
