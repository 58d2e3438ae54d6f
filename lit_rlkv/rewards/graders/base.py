"""Grader: the interface of graders, and one that runs in this process."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from lit_rlkv.types import Problem

Question = dict[str, Any]
"""`prompt` (a text or messages), `answer`, `solution`, `completion` and what else the problem brings."""


class Refused(Exception):
    """A failure that asking again would not mend."""


class Grader(ABC):
    """Answers questions, perhaps several at a time and in any order."""

    @abstractmethod
    def submit(self, question: Question) -> "Future[float]":
        """A finite number, or an exception; never neither: each grader has its time-outs."""

    def close(self) -> None:
        """End what it has started; questions under way fail."""
        return None


class Immediate(Grader):
    """For functions of a few microseconds, which cannot hang."""

    def __init__(self, score: Callable[[Question], float]) -> None:
        self._score = score

    def submit(self, question: Question) -> "Future[float]":
        future: Future[float] = Future()
        try:
            future.set_result(as_score(self._score(question)))
        except Exception as error:
            future.set_exception(error)
        return future


def question_of(problem: Problem, completion: str) -> Question:
    """A completion with all that is known of its problem, as JSON can hold it."""
    prompt = problem.prompt
    asked = prompt if isinstance(prompt, str) else [asdict(message) for message in prompt]
    own = {"prompt": asked, "answer": problem.answer, "solution": problem.solution}
    return {**problem.extra, **own, "completion": completion}


def as_score(value: Any) -> float:
    """The number that a reward function answered with.

    Raises:
        ValueError: no number, or one that is not finite.
    """
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"it answered {value!r}, which is no finite number")
    return float(value)
