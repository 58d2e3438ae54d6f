"""Mathematical equality as a reward, by math-verify without its own timeouts, which use signals."""

import logging
import re
from functools import lru_cache
from typing import Any
from unicodedata import normalize

from math_verify import parse, verify
from sympy import Expr, Set

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off

_DELIMITERS = ("$", r"\boxed", r"\[", r"\(")
_BOX = re.compile(r"\\boxed\s*\{")
_MARKER = "####"
_PERCENT = re.compile(r"(?<!\s)(?:\s|\\,)*(?:\\?%|\b(?:percent|pct)\b)(?=[\s.$]*\Z)")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])([0-9]+)(?:\.([0-9]+))?[eE]([-+]?[0-9]{1,3})(?!\.?\w)")
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_MAX_LENGTH = 300
"""Longest text without a mark that is read as one expression; a long one takes long."""
_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]+)*")
_LAYOUT = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|\\?\$|\\[()\[\]]")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


def equals(completion: str, answer: str, float_rounding: int) -> float:
    """1.0 if the final answer of the completion equals the answer, as a text or as an expression."""
    (stated, is_boxed), gold = _final_answer(completion), _bare(answer)
    texts = {_bare(completion), _bare(stated)}
    if _WORDS.fullmatch(gold):  # math-verify reads a word as a product, so `yes` would equal `sye`
        return float(gold.casefold() in map(str.casefold, texts))
    if gold in texts:
        return 1.0
    expected, is_percent = _gold(answer)
    readings = [_read(stated, is_latex=is_boxed)]
    if is_boxed and any(isinstance(value, Set) for value in expected):
        readings.append(_read(completion, is_latex=False))  # the set of all boxes
    return float(any(_is_equal(expected, is_percent, *reading, float_rounding) for reading in readings))


def _is_equal(
    expected: list[Any], is_percent: bool, stated: list[Any], states_percent: bool, float_rounding: int
) -> bool:
    """True if two readings are equal, or if one alone is a percentage and is equal as a fraction."""
    pairs = [(expected, stated)]
    if is_percent != states_percent:
        pairs.append((_hundredth(expected), stated) if is_percent else (expected, _hundredth(stated)))
    return any(verify(*pair, float_rounding=float_rounding, timeout_seconds=None) for pair in pairs)


@lru_cache(maxsize=1024)
def _gold(answer: str) -> tuple[list[Any], bool]:
    return _read(answer, is_latex=True)


def _final_answer(completion: str) -> tuple[str, bool]:
    """Return what a completion marks as its answer, by box, tag or marker, or all of it; True for a box."""
    _, tag, tagged = completion.rpartition("</answer>")[0].rpartition("<answer>")
    text = tagged if tag else completion
    for box in reversed([*_BOX.finditer(text)][-3:]):  # the last may have been cut off
        content = _to_closing_brace(text[box.end() :])
        if content is not None:
            return content.replace("\n", " "), True
    _, marker, behind = text.rpartition(_MARKER)
    return (behind if marker and behind.strip() else text).strip(), False


def _to_closing_brace(text: str) -> str | None:
    depth = 1
    for brace in re.finditer(r"(?<!\\)[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return None


def _bare(text: str) -> str:
    """Return a text without layout, to be compared as it is."""
    text = _LAYOUT.sub("", _TEXT.sub(r"\1", text)).replace(r"\%", "%")
    return re.sub(r" ?([^\w\s]) ?", r"\1", re.sub(r"\s+", " ", text)).strip().rstrip(".")


def _read(text: str, *, is_latex: bool) -> tuple[list[Any], bool]:
    """Return the last expression of a text without its percent sign, and if it had one.

    Args:
        is_latex: the text is one expression, perhaps without dollar signs around it; else it may be prose.
    """
    text = _SCIENTIFIC.sub(_written_out, _in_latex(text))
    bare = _PERCENT.sub("", text, count=1)
    # Outside of dollar signs math-verify looks for a number: of 3\pi it takes 3. It alone reads 1 000.
    is_plain = bare.replace(" ", "").isdigit() or any(mark in bare for mark in _DELIMITERS)
    if is_plain or not (is_latex or (len(bare) <= _MAX_LENGTH and not _WORD.search(bare))):
        spaced = re.sub(r"(?<=[^\W\d_]|\*)[:\uff1a](?=\**[-$\d.])", ": ", bare)
        forms = [spaced, f"${bare}$"][: 1 + (len(bare) <= _MAX_LENGTH)]
    else:
        forms = [f"${bare}$", bare]
    readings = (parse(form, parsing_timeout=None) for form in forms)
    return next(filter(None, readings), []), bare != text


def _in_latex(text: str) -> str:
    """Return a text with raised digits and signs for fractions in LaTeX: math-verify would read 5² as 5."""
    text = _SUPERSCRIPTS.sub(lambda power: f"^{{{normalize('NFKC', power[0])}}}", text)
    text = _VULGAR.sub(
        lambda sign: r"\frac{{{}}}{{{}}}".format(*re.findall("[0-9]+", normalize("NFKC", sign[0]))), text
    )
    return text.replace("−", "-")


def _hundredth(found: list[Any]) -> list[Any]:
    return [value / 100 for value in found if isinstance(value, Expr)]


def _written_out(number: re.Match[str]) -> str:
    """Return a number in scientific notation in digits: math-verify reads 4.5e33 as 4.5 times e times 33."""
    decimals = number[2] or ""
    digits, point = number[1] + decimals, int(number[3]) - len(decimals)
    if point >= 0:
        return digits + "0" * point
    digits = digits.rjust(1 - point, "0")
    return f"{digits[:point]}.{digits[point:]}"
