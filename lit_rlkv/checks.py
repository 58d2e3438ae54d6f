"""Predicates and ranges for values of a config or a file, and dataclasses from the values of a file."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, core_schema

_Built = TypeVar("_Built")

Number = float | int
MAX_WHOLE = 2**31 - 1
"""Size of the largest whole number that is a setting: counts index tensors, partly by int32."""
MAX_NUMBER = 1e18
"""Size of the largest other number that is a setting: its square is finite in float32."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1_000_000
"""Ends of the range of temperatures, in which logits divided by one are finite in float32."""


class OneLineError(Exception):
    """An error whose message says all that a user needs: what happened, why, and what to do."""


def is_whole(value: Any) -> bool:
    """True for an integer, of numpy too; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """True for an integer or a float, of numpy too; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """True for a finite number."""
    return is_whole(value) or (is_number(value) and math.isfinite(value))


@dataclass(frozen=True, kw_only=True)
class Range:
    """The range of a number; NaN and infinity are outside of every range.

    A side without a bound ends at MAX_WHOLE or MAX_NUMBER.
    """

    least: Number | None = None
    """Smallest allowed number."""
    above: Number | None = None
    """Every number must be larger."""
    most: Number | None = None
    """Largest allowed number."""
    below: Number | None = None
    """Every number must be smaller."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> CoreSchema:
        """Let pydantic check a field that is `Annotated[int, Range(...)]`, or of another number."""

        def checked(value: Any) -> Any:
            if not self.holds(value, kind):
                raise ValueError(f"must be {self.describe(kind, value)}")
            return value

        return core_schema.no_info_plain_validator_function(checked)

    def holds(self, value: Any, kind: Any = float) -> bool:
        """True if a value is a number of this kind, int or any other, inside the range."""
        limit = MAX_WHOLE if kind is int else MAX_NUMBER
        if not (is_whole(value) if kind is int else is_finite(value)):
            return False
        is_low = value < (-limit if self.least is None else self.least)
        is_high = value > (limit if self.most is None else self.most)
        return not (
            is_low
            or is_high
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        )

    def describe(self, kind: Any = float, value: Any = None) -> str:
        """Return kind and bounds in words, with the common limit if `value` is beyond it."""
        limit = MAX_WHOLE if kind is int else MAX_NUMBER
        is_beyond = is_number(value) and math.inf > abs(value) > limit
        most = limit if kind is int else f"{limit:g}"
        bounds = [
            None if self.least is None else f"of at least {self.least}",
            None if self.above is None else f"above {self.above}",
            None if self.most is None else f"at most {self.most}",
            None if self.below is None else f"below {self.below}",
            f"of at most {most} in size" if is_beyond and self.most is self.below is None else None,
        ]
        words = " and ".join(bound for bound in bounds if bound is not None)
        return f"{'a whole number' if kind is int else 'a number'} {words}".rstrip()

    def check(self, name: str, value: Any, kind: Any = float, hint: str = "change it") -> None:
        """Raise a ValueError that names a setting unless its value is a number inside the range."""
        if not self.holds(value, kind):
            raise ValueError(f"{name} must be {self.describe(kind, value)}, got {value}; {hint}")


def check_temperature(name: str, value: Any, *, is_greedy_allowed: bool) -> None:
    """Raise a ValueError unless a value is a temperature, or 0 where that stands for greedy decoding."""
    if is_greedy_allowed and value == 0:
        return
    Range(least=MIN_TEMPERATURE, most=MAX_TEMPERATURE).check(
        name, value, hint="0 decodes greedily" if is_greedy_allowed else "greedy decoding has no log-probs"
    )


def fits(value: Any, kind: Any) -> bool:
    """True if a value of a JSON file has a type; a whole number may be a float, and a bool is no number."""
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


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


@cache
def _adapter(kind: Any) -> Any:
    return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
