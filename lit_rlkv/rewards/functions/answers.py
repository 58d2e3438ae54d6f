"""Reward functions that look at the final answer or the form of a completion."""

import re
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from typing import NamedTuple

from lit_rlkv.checks import Range
from lit_rlkv.rewards.functions.base import RewardFunction, SlowFunction
from lit_rlkv.rewards.graders import Grader, Immediate, Question
from lit_rlkv.rewards.isolated import MATHEMATICS, WORKER
from lit_rlkv.rewards.verifier import final_answer
from lit_rlkv.types import Problem

_SIGNS = "-−–+"
"""Hyphen, minus, en dash, plus."""
_PLAIN = r"(?:[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)"
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_IN_NAME = "0-9A-Za-zÀ-ɏͰ-ϿЀ-ӿ"
"""Letters of scripts with spaces between words: a number beside any other letter stands for itself."""
_NUMBER = re.compile(
    # A sign behind a letter, a digit or a bracket is an operator; digits behind a letter are a name.
    rf"(?:(?<![{_IN_NAME})])(?<![{_IN_NAME}]\.)(?P<sign>[{_SIGNS}]))?"
    rf"(?<![{_IN_NAME}])(?<![{_IN_NAME}][_.])[$€£]?"
    r"(?:(?P<whole>[0-9]{1,20})[ ](?=[0-9]{1,20}[ ]?/[ ]?[0-9]))?"
    rf"(?P<number>{_PLAIN})(?:[eE](?P<power>[-+]?[0-9]{{1,2}})(?!\w))?"
    rf"(?:\s?/\s?(?P<below>{_PLAIN}))?(?P<percent>\s?\\?%)?"
    rf"(?P<raised>(?:[ ]?\^[ ]?(?:\{{[^{{}}]{{0,40}}\}}|[{_SIGNS}]?[0-9]*))+)?"
    rf"(?:(?=(?P<operated>[ \t]*(?:[{_SIGNS}*×÷/]{{1,2}}|\\times|\\cdot)[ \t]*[0-9]))|)"
)
_FRACTION = re.compile(rf"\\[dt]?frac\s?\{{\s?([{_SIGNS}]?{_PLAIN})\s?\}}\s?\{{\s?({_PLAIN})\s?\}}")
MAX_DECIMALS = 15
"""Most decimals by which floats are compared; a float has no more."""
MAX_DIGITS = 300
"""Longer numbers do not count: no answer has as many digits, and arithmetic on them takes long."""


def check_has_answer(problem: Problem) -> None:
    """Raise a ValueError if a problem has no answer to compare with."""
    if not problem.answer.strip():
        raise ValueError("the answer to compare with must not be empty; set task.answer_column")


@dataclass(frozen=True, kw_only=True)
class ExactMatch(RewardFunction):
    """1.0 if the final answer is the reference, both stripped of surrounding whitespace; else 0.0."""

    answer_after: str | None = None
    """Marker before the answer, of which the last counts; None compares the whole completion."""
    ignore_case: bool = False

    def open(self) -> Grader:
        return Immediate(self._score)

    def check(self, problem: Problem) -> None:
        check_has_answer(problem)

    def _score(self, question: Question) -> float:
        stated, answer = final_answer(question["completion"], self.answer_after), question["answer"].strip()
        if stated is not None and self.ignore_case:
            stated, answer = stated.casefold(), answer.casefold()
        return float(stated == answer)


@dataclass(frozen=True, kw_only=True)
class Regex(SlowFunction):
    """1.0 if the pattern is found in the completion, as a reward for its format; else 0.0.

    With a group: 1.0 if that group of the last match is the answer.
    """

    pattern: str
    """Pattern of Python's re; after `(?s)` a dot matches line ends, `\\A` and `\\Z` are a text's ends."""
    group: int | str | None = None
    """Number or name of the group."""
    timeout_s: float | int = 1.0
    n_workers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"pattern must be a regular expression, got {self.pattern!r}: {error}; write one of Python's "
                "re, with a backslash before each of .^$*+?{}[]()|\\ that stands for itself"
            ) from error
        known = [*range(compiled.groups + 1), *compiled.groupindex]
        if self.group is not None and self.group not in known:
            raise ValueError(
                f"group must be one of {known} of pattern={self.pattern!r}, or null, got {self.group!r}"
            )

    def open(self) -> Grader:
        # A pattern may take for ever to match, so it is tried where it can be stopped.
        return self.open_pool(WORKER, "matches", {"pattern": self.pattern, "group": self.group})

    def check(self, problem: Problem) -> None:
        if self.group is not None:
            check_has_answer(problem)


@dataclass(frozen=True, kw_only=True)
class MathVerify(SlowFunction):
    """1.0 if the last expression of the completion, LaTeX or plain, equals the answer; else 0.0."""

    float_rounding: int = 6
    """Decimals by which floats are compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Range(least=0, most=MAX_DECIMALS).check("float_rounding", self.float_rounding, int)
        if find_spec("math_verify") is None:
            raise ImportError('MathVerify needs the package math-verify; pip install -e ".[math]"')

    def open(self) -> Grader:
        # Only the worker imports math-verify and sympy.
        return self.open_pool(MATHEMATICS, "equals", {"float_rounding": self.float_rounding})

    def check(self, problem: Problem) -> None:
        check_has_answer(problem)


class _Value(NamedTuple):
    number: Fraction
    is_percent: bool


@dataclass(frozen=True, kw_only=True)
class Numeric(RewardFunction):
    """1.0 if the final answer is the reference number; else 0.0.

    1,000 is 1000, $5 is 5, 3/4 and \\frac{3}{4} are 0.75, and 3 1/2 is 3.5. 50% equals 50 and 0.5. A number
    that is part of something else, as in 10^6, 5 - 3 or 1,0000, is not an answer.
    """

    answer_after: str | None = None
    """Marker before the answer, of which the last counts; None takes the completion's last number."""
    tolerance: float | int = 0.0
    """Largest difference from the reference."""

    def __post_init__(self) -> None:
        super().__post_init__()
        Range(least=0).check("tolerance", self.tolerance)

    def open(self) -> Grader:
        return Immediate(self._score)

    def check(self, problem: Problem) -> None:
        _reference(problem.answer)

    def _score(self, question: Question) -> float:
        reference, completion = _reference(question["answer"]), question["completion"]
        if self.answer_after is not None:
            _, marker, completion = completion.rpartition(self.answer_after)
            if not marker:
                return 0.0
        found = _values(completion)
        stated = found[-1 if self.answer_after is None else 0] if found else None
        return float(stated is not None and self._is_equal(stated, reference))

    def _is_equal(self, stated: _Value, reference: _Value) -> bool:
        gaps = [stated.number - reference.number]
        if stated.is_percent and not reference.is_percent:
            gaps.append(stated.number / 100 - reference.number)
        if reference.is_percent and not stated.is_percent:
            gaps.append(stated.number - reference.number / 100)
        return any(abs(gap) <= self.tolerance for gap in gaps)


def _reference(answer: str) -> _Value:
    found = _values(answer)
    if len(found) != 1 or found[0] is None:
        raise ValueError(f"the answer must be one number, got {answer!r}; fix it, or use another function")
    return found[0]


def _values(text: str) -> list[_Value | None]:
    """Return the numbers in a text; None stands for a number that is part of something else."""
    values: list[_Value | None] = []
    end_of_operation = 0
    for match in _NUMBER.finditer(_FRACTION.sub(_inline_fraction, text)):
        values.append(None if match.start() < end_of_operation else _value(match))
        end_of_operation = match.end("operated")  # behind the next number's first digit; -1 without one
    return values


def _inline_fraction(fraction: re.Match[str]) -> str:
    """Return a LaTeX fraction as 3/4, with a space behind a digit or letter."""
    before = fraction.string[max(0, fraction.start() - 1) : fraction.start()]
    return f"{' ' if before.isalnum() else ''}{fraction[1]}/{fraction[2]}"


def _value(match: re.Match[str]) -> _Value | None:
    parts = [match[name] or "" for name in ("number", "below")]
    is_grouped = all("," not in part or _GROUPED.fullmatch(part) for part in parts)
    if match["raised"] or match["operated"] or not is_grouped or max(map(len, parts)) > MAX_DIGITS:
        return None
    number, below = (Fraction((part or "1").replace(",", "")) for part in parts)
    if below == 0:
        return None
    sign = 1 if match["sign"] in (None, "+") else -1
    power = Fraction(10) ** int(match["power"] or 0)
    number = int(match["whole"] or 0) + number * power / below
    return _Value(sign * number, match["percent"] is not None)
