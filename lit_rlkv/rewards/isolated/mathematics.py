"""Mathematical equality as a reward, by math-verify without its time-outs, which take signals."""

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(
    logging.ERROR
)  # it warns of missing time-outs; whoever asks has them

_DELIMITERS = ("$", r"\boxed", r"\[", r"\(")


def equals(completion: str, answer: str, float_rounding: int) -> float:
    """1.0 if the last expression of the completion equals the answer.

    Raises:
        ValueError: the answer is nothing that math-verify reads.
    """
    stated = parse(completion, parsing_timeout=None)
    return float(verify(_gold(answer), stated, float_rounding=float_rounding, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _gold(answer: str) -> list[Any]:
    """The answer, which may be written as plain LaTeX without the dollar signs around it."""
    # Outside of dollar signs math-verify looks for a number: of 3\pi it takes 3. It alone reads 1 000.
    is_plain = answer.replace(" ", "").isdigit() or any(mark in answer for mark in _DELIMITERS)
    for text in (answer, f"${answer}$") if is_plain else (f"${answer}$", answer):
        found: list[Any] = parse(text, parsing_timeout=None)
        if found:
            return found
    raise ValueError(f"math-verify reads nothing in the answer {answer!r}; mend it, or use another function")
