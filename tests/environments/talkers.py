"""Environments for tests, and a tokenizer whose turns end soon."""

import time
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.environments import Environment, Observation
from lit_rlkv.types import Problem

ENDS = tuple(range(20, 40))
COUNTING = [
    "environment=custom",
    "environment._target_=tests.environments.talkers.Counter",
    "reward.environment=1",
    "rollout.environment_timeout_s=null",
]
"""Overrides of a run whose environment is `Counter`, which must trust `tests`."""


def quick_tokenizer() -> PreTrainedTokenizerBase:
    """The task tokenizer, in which more than a third of the tokens end a turn."""
    tokenizer = build_task_tokenizer()
    tokenizer.end_ids = ENDS
    return tokenizer


@dataclass
class Counter(Environment):
    """Answers turn n with `n;` and the reward n, up to a number of turns; then it is done."""

    n_turns: int = 3
    sleep_s: float = 0.0
    n: int = 0

    def reset(self, problem: Problem) -> Observation | None:
        return "?"

    def step(self, response: str) -> tuple[Observation | None, float, bool]:
        self.n += 1
        time.sleep(self.sleep_s)
        self.answer(response)
        return f"{self.n};", float(self.n), self.n == self.n_turns

    def answer(self, response: str) -> None:
        """For what may go wrong."""


class Crashing(Counter):
    def answer(self, response: str) -> None:
        if len(response) % 2 == 0:
            raise RuntimeError("of even length")


class Hanging(Counter):
    def answer(self, response: str) -> None:
        if len(response) % 4 == 1:  # few enough that some of 16 responses never do
            time.sleep(30)


class Leaving(Counter):
    def answer(self, response: str) -> None:
        raise SystemExit(0)


class Unreachable(Counter):
    def reset(self, problem: Problem) -> Observation | None:
        raise SystemExit(0)


class Lazy(Counter):
    def step(self, response: str) -> tuple[Observation | None, float, bool]:
        return "", 0.0, False
