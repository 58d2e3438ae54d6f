"""Reward functions that look at the final answer or the form of a completion."""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from typing import NamedTuple

import regex

from lit_rlkv.checks import Range
from lit_rlkv.rewards.functions.base import RewardFunction, SlowFunction
from lit_rlkv.rewards.graders import Grader, Immediate, Question
from lit_rlkv.rewards.isolated import MATHEMATICS
from lit_rlkv.rewards.verifier import final_answer
from lit_rlkv.types import Problem

_SIGNS = "-−–+"
"""Hyphen, minus, en dash, plus."""
_IN_NAME = "0-9A-Za-zÀ-ɏͰ-ϿЀ-ӿ"
"""Letters of scripts with spaces between words: a number beside any other letter stands for itself."""
_OPERAND = rf"(?:(?<![{_IN_NAME}])[B-HJ-Zb-hj-z](?![{_IN_NAME}'’]))"
"""A variable; `A`, `a`, `I` and `i` are words."""
_MONEY = r"[A-Z]{0,3}[$€£¥₹]"
_FUNCTIONS = (
    r"\\(?:[dtc]?frac|[dt]?binom|sqrt|log|ln|lg|exp|a?(?:rc)?(?:sin|cos|tan)h?|cot|sec|csc|sum|prod|int|lim|over|"
    r"overline|bar|dot|lfloor|lceil|max|min|gcd|[bp]?mod|pi|e|i|theta|phi|alpha|beta|infty)(?![A-Za-z])"
)
_GROUPED = "|".join(rf"(?:{mark}[0-9]{{3}})+" for mark in ",'_ ")
_PLAIN = rf"(?:(?:[1-9][0-9]{{0,2}}(?:{_GROUPED})|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_FRACTION = re.compile(
    rf"\\[dtc]?frac\s?(?:\{{\s?([{_SIGNS}]?{_PLAIN})\s?\}}|([0-9]))\s?(?:\{{\s?({_PLAIN})\s?\}}|([0-9]))"
)
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " ")
    | dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff\ufe0f\u20e3")
    | dict(zip("⁄∕％٪＄．٫٬－﹣＋’·⋅×", "//%%$..,--+'***", strict=True))  # noqa: RUF001
    | {"√": r"\sqrt", "…": "...", "º": "°"}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_POWER = rf"\s*([{_SIGNS}]?[0-9]{{1,5}})\s*"
_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"(?![0-9])\d"), lambda digit: str(unicodedata.decimal(digit[0]))),
    (re.compile("[⁰¹²³⁴-⁹⁺⁻]+"), lambda power: "^" + power[0].translate(_SUPERSCRIPTS)),
    (re.compile(r"\\!|\\(?:left|right|displaystyle|text\w*|math[a-z]{2}|[fm]box|boxed|bm)(?![A-Za-z])"), ""),
    (re.compile(r"\{,\}|(?<=[0-9])\uff0c(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"[ ]?(?:\\[,;: ]|\\q?quad(?![A-Za-z])|(?<=[0-9])~(?![0-9]))[ ]?"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "÷"),
    (re.compile(r"\\(?:pm|mp)(?![A-Za-z])|\+/[-−–]"), "±"),
    (re.compile(r"\\[lc]?dots(?![A-Za-z])"), "..."),
    (re.compile(r"\^\s?(?:\\circ|\{\s?\\circ\s?\})|\\degree(?![A-Za-z])"), "°"),
    (
        re.compile("[¼-¾⅐-⅞↉]"),
        lambda sign: _spaced(sign, unicodedata.normalize("NFKC", sign[0]).replace("\u2044", "/")),
    ),
    (_FRACTION, lambda part: _spaced(part, f"{part[1] or part[2]}/{part[3] or part[4]}")),
    (
        re.compile(
            rf"(?<=[0-9])\s*[*xX]\s*10\s*(?:\^|\*\*)(?:\s?\{{{_POWER}\}}|\({_POWER}\)|{_POWER})(?!\.?[0-9])"
        ),
        lambda power: f"e{power[1] or power[2] or power[3]} ",
    ),
)
"""Other digits, spaces, signs and LaTeX as the characters that the patterns below read."""
_CLOSERS, _OPENERS = r"[)\]}$]*", rf"(?:[(\[{{]|{_MONEY})*"
_DIGITS = r"(?:(?<![.,'_:0-9])[1-9][0-9]{0,2}(?:[ ][0-9]{3}(?![0-9]))+|[0-9]+)"
_RUN = re.compile(
    rf"(?:(?<!\.)\.)?{_DIGITS}(?:(?:"
    r"[.,'_:]|_\{|,?[ ](?=0[0-9])|[eE][-+−–]?|[ ](?=[0-9]{1,20}[ ]?/[ ]?[0-9])|[ ]:[ ]|"
    rf"{_CLOSERS}[ \t]*(?:[{_SIGNS}*/÷±^~]{{1,2}}|%[ ]|(?:plus|minus|times|mod|x|divided by) )[ \t]*"
    rf"{_OPENERS}\.?"
    rf")(?=[0-9]){_DIGITS})*"
)
"""A number with all that connects it to further digits."""
_NUMBER = re.compile(
    rf"(?:(?P<whole>[0-9]{{1,20}}) (?=[0-9]+ ?/))?(?P<number>{_PLAIN})"
    rf"(?:[eE](?P<power>[{_SIGNS}]?[0-9]{{1,4}}))?(?: ?/ ?(?P<below>{_PLAIN}))?"
)
_NAME = re.compile(rf"(?:[{_IN_NAME}][_.]?|[{_IN_NAME})\]}}]_\{{|\^[({{]*[{_SIGNS}]?)\Z")
"""Before the digits of a name (`x2`, `x_{12}`) and before exponents, which are no numbers of their own."""
_INSIDE = re.compile(
    rf"(?:{_FUNCTIONS}\s*(?:[_^]?\{{[^{{}}]*\}}|\[[^\]]*\]|[_^]\w)*\s*[(\[{{]*[{_SIGNS}]?|\}}\s*\{{|±\s*|"
    rf"[{_IN_NAME}]\.?\(|[{_IN_NAME})\]}}](?:[*/÷]|\*\*){_OPENERS}|"
    rf"(?:{_OPERAND}|[)\]}}])[ \t]+(?:[*/÷]|\*\*)[ \t]+{_OPENERS})\Z"
)
"""Before a number that is an argument or an operand."""
_SIGNED = re.compile(
    rf"(?P<sign>[{_SIGNS}]|\b(?:[Mm]inus|[Nn]egative)\b)(?P<gap>(?:[ \t]|{_OPENERS}(?<=\S))*)\Z"
)
_OPERATED = re.compile(rf"(?:[{_SIGNS}/÷^±]|(?<=[{_IN_NAME})\]}}])\$|[)\]}}]|{_OPERAND})\Z")
"""Before a sign that is an operator."""
_STATES = re.compile(r"(?:^\s*|[=:,;(\[{$<>≈]|\b(?:is|are|was|equals?|be|get|gives?))\Z")
"""Before a sign that stands apart from its number; elsewhere such a sign is a dash or an item of a list."""
_GOES_ON = re.compile(
    rf"{_CLOSERS}[ ]?[\^‰]|[ ]?{_FUNCTIONS}|[ ]?[α-λν-ω√∞]|\.?[(\[][0-9]|\.?\\(?:overline|bar|dot)|"
    rf"{_CLOSERS}[ \t]*(?:[{_SIGNS}*/÷±^]|\*\*)[ \t]*[({{\[]*(?:{_FUNCTIONS}|{_OPERAND})|"
    r"[\u0304\u0305\u0307十百千万萬亿億兆]|[ABD-EG-IKMO-UX-Zabefijknopqrtuvwxyz](?![A-Za-zÀ-ɏ])|[A-Za-z]+[0-9]|"
    r"[ ][BDEGHKMO-UX-Zbefjknopqrtuvwxyz](?!['’.-]?[A-Za-zÀ-ɏ])|"
    r"(?:bn|mn|tn|mio|mrd)\b|[ ](?:squared|cubed)\b|[ -]?(?:hundred|thousand|million)ths?\b"
)
"""Behind a number that is part of something larger, such as 5x, 5^2, 5\\pi or 5k."""
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_UNIT = re.compile(
    rf"{_CLOSERS}[ ]?(?:(?P<percent>%|(?:percent|per cent|pct)\b)|(?P<scale>{'|'.join(_SCALES)})\b)"
)
MAX_DECIMALS = 15
"""Most decimals by which floats are compared; a float has no more."""
_CONTEXT = 60
"""Characters before and behind a number that decide if it is one."""
MAX_DIGITS = 300
"""Longer numbers do not count: no answer has as many digits, and arithmetic on them takes long."""
PATTERN_LIMIT_S = 1.0
"""Longest search of a pattern in one completion."""


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
class Regex(RewardFunction):
    """1.0 if the pattern is found in the completion, as a reward for its format; else 0.0.

    With a group: 1.0 if that group of the last match is the answer. A search that takes longer than a second
    has failed.
    """

    pattern: str
    """Pattern of the package regex; after `(?s)` a dot matches line ends, `\\A` and `\\Z` a text's ends."""
    group: int | str | None = None
    """Number or name of the group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            compiled = regex.compile(self.pattern)
        except regex.error as error:
            raise ValueError(
                f"pattern must be a regular expression, got {self.pattern!r}: {error}"
            ) from error
        known = [*range(compiled.groups + 1), *compiled.groupindex]
        if self.group is not None and self.group not in known:
            raise ValueError(
                f"group must be one of {known} of pattern={self.pattern!r}, or null, got {self.group!r}"
            )

    def open(self) -> Grader:
        return Immediate(self._score)

    def check(self, problem: Problem) -> None:
        if self.group is not None:
            check_has_answer(problem)

    def _score(self, question: Question) -> float:
        completion = question["completion"]
        if self.group is None:
            return float(regex.search(self.pattern, completion, timeout=PATTERN_LIMIT_S) is not None)
        found = [
            match[self.group] for match in regex.finditer(self.pattern, completion, timeout=PATTERN_LIMIT_S)
        ]
        return float(bool(found) and (found[-1] or "").strip() == question["answer"].strip())


@dataclass(frozen=True, kw_only=True)
class MathVerify(SlowFunction):
    """1.0 if the final answer of the completion, LaTeX or plain, equals the answer; else 0.0.

    It is in the last answer tag or `\\boxed`, behind the last `####`, or else the last expression.
    """

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

    1,000 and 1.0e3 are 1000, -$5 is -5, 3/4 and \\frac{3}{4} are 0.75, and 3 1/2 is 3.5. 50% equals 50 and
    0.5. A number that is part of something else, as in 10^6, 5 - 3, 5x or 1,0000, is not an answer.
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
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    runs = [(run, text[max(0, run.start() - _CONTEXT) : run.start()]) for run in _RUN.finditer(text)]
    return [_value(run, before) for run, before in runs if not _NAME.search(before)]


def _spaced(match: re.Match[str], number: str) -> str:
    """Return a number in place of a match, apart from digits beside it: 2½ is 2 1/2, and ½2 is a product."""
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return f"{' ' * before.isdecimal()}{number}{'*' * after.isdecimal()}"


def _value(run: re.Match[str], before: str) -> _Value | None:
    after = run.string[run.end() : run.end() + _CONTEXT]
    match = _NUMBER.fullmatch(run[0]) if len(run[0]) <= 2 * MAX_DIGITS else None
    sign = _sign(before)
    is_cut = "." in run[0] and after.startswith("..")
    if match is None or sign == 0 or is_cut or _INSIDE.search(before) or _GOES_ON.match(after):
        return None
    number, below = (Fraction(re.sub("[,'_ ]", "", match[name] or "1")) for name in ("number", "below"))
    power = int(re.sub("[−–]", "-", match["power"] or "0"))
    if below == 0 or abs(power) > MAX_DIGITS:
        return None
    number = int(match["whole"] or 0) + number * Fraction(10) ** power / below
    unit = _UNIT.match(after)
    scale = _SCALES[unit["scale"]] if unit and unit["scale"] else 1
    return _Value(sign * scale * number, bool(unit and unit["percent"]))


def _sign(before: str) -> int:
    """Return 1 or -1 by the text before a number; 0 if its sign is an operator."""
    match = _SIGNED.search(before)
    if match is None:
        return 1
    ahead, gap = before[: match.start()], match["gap"]
    stem = ahead.rstrip(" \t")
    is_attached = stem == ahead and re.search(rf"[{_IN_NAME}]\Z", stem)
    if is_attached or _OPERATED.search(stem):
        return 0
    is_line = match["sign"] not in _SIGNS and stem.endswith("\n")
    if gap[:1].isspace() and not is_line and not _STATES.search(stem):
        return 1 if match["sign"] in "-–+" else 0  # a dash, or a word less a number
    return 1 if match["sign"] == "+" else -1
