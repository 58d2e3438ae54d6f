"""Predicates for values of a config or a file."""

import math
from typing import Any


def is_whole(value: Any) -> bool:
    """True for an integer; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any, least: int = 1) -> bool:
    """True for an integer of at least `least`."""
    return is_whole(value) and value >= least


def is_number(value: Any) -> bool:
    """True for an int or a float; a bool is none."""
    return is_whole(value) or isinstance(value, float)


def is_finite(value: Any) -> bool:
    """True for a finite number."""
    return is_number(value) and math.isfinite(value)
