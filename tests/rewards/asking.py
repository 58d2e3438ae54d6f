"""Reward functions asked one question or several."""

from contextlib import contextmanager

from lit_rlkv.rewards.graders import question_of
from lit_rlkv.types import Problem


@contextmanager
def opened(function):
    """`ask(completion, answer)` gives the score, or raises what went wrong."""
    grader = function.open()

    def ask(completion, answer="", prompt="?", solution="", **extra):
        return grader.submit(question_of(Problem(prompt, solution, answer, extra), completion)).result()

    yield ask
    grader.close()


def score(function, completion, answer="", **fields):
    with opened(function) as ask:
        return ask(completion, answer, **fields)
