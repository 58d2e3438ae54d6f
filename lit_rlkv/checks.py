"""What a value of a config or a file is, before anything is done with it."""

import math
from typing import Any


def is_whole(value: Any) -> bool:
    """Whether it is a whole number; YAML's true is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any, least: int = 1) -> bool:
    """Whether it is a whole number of at least `least`."""
    return is_whole(value) and value >= least


def is_number(value: Any) -> bool:
    """Whether it is a number; YAML's true is none."""
    return is_whole(value) or isinstance(value, float)


def is_finite(value: Any) -> bool:
    """Whether it is a number other than an infinity and NaN."""
    return is_number(value) and math.isfinite(value)
