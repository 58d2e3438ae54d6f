"""Rewards from regular expressions."""

import re
from dataclasses import dataclass

from lit_rlkv.rewards.functions.base import SlowFunction
from lit_rlkv.rewards.graders import Grader
from lit_rlkv.rewards.isolated import FOLDER
from lit_rlkv.types import Problem


@dataclass(frozen=True, kw_only=True)
class Regex(SlowFunction):
    """1.0 if the pattern is found in the completion, as a reward for its format; else 0.0.

    With a group: 1.0 if that group of its last match is the answer.

    Raises:
        ValueError: a pattern that is no regular expression, or a group that it does not have.
    """

    pattern: str
    """Pattern of Python's re; after `(?s)` a dot matches line ends, `\\A` and `\\Z` are a text's ends."""
    group: int | str | None = None
    """By number or name."""
    timeout_s: float | int = 1.0
    n_workers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"pattern={self.pattern!r} is no regular expression: {error}; write one of Python's re, with "
                "a backslash before each of .^$*+?{}[]()|\\ that stands for itself"
            ) from error
        known = [*range(compiled.groups + 1), *compiled.groupindex]
        if self.group is not None and self.group not in known:
            raise ValueError(
                f"pattern={self.pattern!r} has no group={self.group!r}; give one of {known}, or null"
            )

    def check(self, problem: Problem) -> None:
        if self.group is not None and not problem.answer.strip():
            raise ValueError(
                f"the answer is empty, so group={self.group!r} cannot be compared with it; mend it, or leave "
                "group out"
            )

    def open(self) -> Grader:
        options = {"pattern": self.pattern, "group": self.group}
        return self.in_processes(FOLDER / "pattern.py", "matches", options)
