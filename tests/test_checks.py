import math

import pytest

from lit_rlkv.checks import is_count, is_finite, is_number, is_whole


@pytest.mark.parametrize(
    ("value", "whole", "number", "finite"),
    [
        (3, True, True, True),
        (-1, True, True, True),
        (0.5, False, True, True),
        (2.0, False, True, True),
        (math.inf, False, True, False),
        (math.nan, False, True, False),
        (True, False, False, False),
        ("1e-5", False, False, False),
        (None, False, False, False),
    ],
)
def test_kinds_of_values(value, whole, number, finite):
    assert (is_whole(value), is_number(value), is_finite(value)) == (whole, number, finite)


def test_a_count_has_a_least_value():
    assert is_count(1)
    assert not is_count(0)
    assert is_count(0, least=0)
    assert not is_count(True)
