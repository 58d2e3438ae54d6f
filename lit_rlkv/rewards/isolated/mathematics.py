"""Mathematical equality as a reward, by math-verify without its own timeouts, which use signals."""

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off

_DELIMITERS = ("$", r"\boxed", r"\[", r"\(")


def equals(completion: str, answer: str, float_rounding: int) -> float:
    """1.0 if the last expression of the completion equals the answer."""
    stated = parse(completion, parsing_timeout=None)
    return float(verify(_gold(answer), stated, float_rounding=float_rounding, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _gold(answer: str) -> list[Any]:
    """Return the parsed answer, which may be LaTeX without the dollar signs around it."""
    # Outside of dollar signs math-verify looks for a number: of 3\pi it takes 3. It alone reads 1 000.
    is_plain = answer.replace(" ", "").isdigit() or any(mark in answer for mark in _DELIMITERS)
    for text in (answer, f"${answer}$") if is_plain else (f"${answer}$", answer):
        found: list[Any] = parse(text, parsing_timeout=None)
        if found:
            return found
    raise ValueError(f"math-verify cannot read the answer {answer!r}; fix it, or use another function")
