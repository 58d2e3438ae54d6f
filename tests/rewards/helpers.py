"""Reward functions to ask, and processes to look for."""

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lit_rlkv.rewards import RewardFunction
from lit_rlkv.rewards.graders import Threads, question_of
from lit_rlkv.types import Problem


@contextmanager
def opened(function):
    """Yield `ask(completion, answer)`, which returns the score or raises the error."""
    grader = function.open()

    def ask(completion, answer="", prompt="?", solution="", **extra):
        return grader.submit(question_of(Problem(prompt, solution, answer, extra), completion)).result()

    yield ask
    grader.close()


def score(function, completion, answer="", **fields):
    with opened(function) as ask:
        return ask(completion, answer, **fields)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@dataclass(frozen=True, kw_only=True)
class InThreads(RewardFunction):
    """A reward function that calls any function of a question, several at a time."""

    ask: Any
    n_workers: int = 4

    def open(self):
        return Threads(self.ask, n_workers=self.n_workers)
