"""Choose what of a large cross runs in the short tier (`make test`); the rest is marked `slow`."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product

import pytest


def slow(*values: object) -> object:
    """One case of a parametrized test that the short tier leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def short_tier(cases: Iterable[object], short: Iterable[object]) -> list[object]:
    """Return all cases of a parametrized test; those that are not in `short` are marked slow.

    Raises:
        ValueError: a case in `short` is not among the cases.
    """
    cases, short = list(cases), list(short)
    if unknown := [case for case in short if case not in cases]:
        raise ValueError(f"the short tier must be some of the cases, got {unknown}")
    return [case if case in short else slow(*_values(case)) for case in cases]


def every_nth(n: int, cases: Iterable[object]) -> list[object]:
    """Return all cases of a parametrized test; all but the first of every `n` are marked slow."""
    cases = list(cases)
    return short_tier(cases, cases[::n])


def pairwise(cases: Sequence[tuple[object, ...]]) -> list[object]:
    """Return all cases; marked slow are those that are not in `covering`."""
    return short_tier(cases, covering(cases))


def covering(cases: Sequence[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Return cases enough to see every pair of values of two axes once.

    The choice is greedy: the case with the most pairs not seen before comes next, the first of equals.
    """
    missing = set().union(*map(_pairs, cases))
    chosen: list[tuple[object, ...]] = []
    while missing:
        best = max(cases, key=lambda case: len(_pairs(case) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def diagonal(*axes: Iterable[object]) -> list[object]:
    """Return the full cross of the axes; all cases but one per value of the longest axis are marked slow.

    Case number n of the short tier takes value n of each axis; shorter axes start over.
    """
    values = [list(axis) for axis in axes]
    longest = max(map(len, values))
    return short_tier(product(*values), [tuple(a[n % len(a)] for a in values) for n in range(longest)])


def _pairs(case: tuple[object, ...]) -> set[tuple[object, object]]:
    """Pairs of (axis, value), of two different axes each."""
    return set(combinations(enumerate(case), 2))


def _values(case: object) -> tuple[object, ...]:
    return case if isinstance(case, tuple) else (case,)
