"""The final answer as a number."""

import re
from dataclasses import dataclass
from fractions import Fraction

from lit_rlkv.rewards.functions.base import RewardFunction
from lit_rlkv.rewards.graders import Grader, Immediate, Question
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
MAX_DIGITS = 300
"""Longer numbers are none: no answer is, and arithmetic on them takes long."""


@dataclass(frozen=True)
class _Value:
    number: Fraction
    is_percent: bool


@dataclass(frozen=True, kw_only=True)
class Numeric(RewardFunction):
    """1.0 if the final answer is the reference number; else 0.0.

    1,000 is 1000, $5 is 5, 3/4 and \\frac{3}{4} are 0.75, and 3 1/2 is 3.5; 50% is 50 and is 0.5, so that it
    may be written either way. What goes on, as in 10^6, 5 - 3 or 1,0000, is no answer.

    Raises:
        ValueError: a tolerance that is below 0 or not finite.
    """

    answer_after: str | None = None
    """The answer is the first number behind the last of these; None takes the completion's last number."""
    tolerance: float | int = 0.0
    """How far off the answer may be."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance={self.tolerance} is no distance; give a number of at least 0")

    def open(self) -> Grader:
        return Immediate(self._score)

    def check(self, problem: Problem) -> None:
        self._reference(problem.answer)

    def _reference(self, answer: str) -> _Value:
        found = _values(answer)
        if len(found) != 1 or found[0] is None:
            raise ValueError(f"the answer {answer!r} is not one number; mend it, or use another function")
        return found[0]

    def _score(self, question: Question) -> float:
        reference, completion = self._reference(question["answer"]), question["completion"]
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


def _values(text: str) -> list[_Value | None]:
    """The numbers of a text; None stands for one that is part of something else."""
    values: list[_Value | None] = []
    end_of_operation = 0
    for match in _NUMBER.finditer(_FRACTION.sub(_in_a_line, text)):
        values.append(None if match.start() < end_of_operation else _value(match))
        end_of_operation = match.end("operated")  # behind the next number's first digit; -1 without one
    return values


def _in_a_line(fraction: re.Match[str]) -> str:
    """A fraction of LaTeX as 3/4, apart from what stands before it."""
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
