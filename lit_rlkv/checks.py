"""Predicates for values of a config or a file, and dataclasses from the values of a file."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_Built = TypeVar("_Built")


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


def fits(value: Any, kind: Any) -> bool:
    """True if a value of a JSON file has a type: a class, a union, or lists and mappings of types."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in args)
    if origin is list:
        return isinstance(value, list) and all(fits(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, args[1]) for item in value.values())
    if kind in (int, float):
        return is_whole(value) if kind is int else is_number(value)
    return isinstance(value, kind)


def from_json(kind: type[_Built], values: Any) -> _Built:
    """Return a dataclass from a JSON object.

    Raises:
        TypeError: a field is missing or unknown, or its value has another type than the field.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{kind.__name__} must be an object, got {type(values).__name__}")
    for name, hint in _hints(kind).items():
        if name in values and not fits(values[name], hint):
            raise TypeError(f"{name} of {kind.__name__} must be {hint}, got {type(values[name]).__name__}")
    return kind(**values)


_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
