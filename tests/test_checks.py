import math
from dataclasses import dataclass, field

import pytest

from lit_rlkv.checks import from_json, is_finite, is_number, is_whole


@pytest.mark.parametrize(
    ("value", "whole", "number", "finite"),
    [
        (3, True, True, True),
        (-1, True, True, True),
        (0.5, False, True, True),
        (2.0, False, True, True),
        (10**400, True, True, True),
        (math.inf, False, True, False),
        (math.nan, False, True, False),
        (True, False, False, False),
        ("1e-5", False, False, False),
        (None, False, False, False),
    ],
)
def test_kinds_of_values(value, whole, number, finite):
    assert (is_whole(value), is_number(value), is_finite(value)) == (whole, number, finite)


@dataclass(frozen=True)
class Row:
    name: str
    share: float
    n: int | None
    counts: list[int]
    extra: dict[str, float] = field(default_factory=dict)


RIGHT = {"name": "a", "share": 1, "n": None, "counts": [1, 2], "extra": {"x": 0.5}}


def test_an_object_becomes_a_dataclass():
    assert from_json(Row, RIGHT) == Row("a", 1, None, [1, 2], {"x": 0.5})
    assert from_json(Row, {key: RIGHT[key] for key in ("name", "share", "n", "counts")}).extra == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": 3},
        {"share": "1"},
        {"share": True},
        {"n": 1.5},
        {"counts": [1, "2"]},
        {"counts": 3},
        {"extra": {"x": None}},
        {"more": 1},
    ],
)
def test_a_value_of_another_type_is_refused(wrong):
    with pytest.raises(TypeError, match=next(iter(wrong))):
        from_json(Row, RIGHT | wrong)
    with pytest.raises(TypeError, match="must be an object, got list"):
        from_json(Row, [RIGHT])
