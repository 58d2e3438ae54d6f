"""Which combinations of values a sweep is made of, and how many runs it has."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.distributions import parse_parameters
from lit_rlkv.sweeping.parameters import Drawn
from lit_rlkv.sweeping.spec import Sweep

MAX_CORNERS = 64
"""Combinations of extreme values that are checked; beyond it, those of one parameter at a time."""


def combinations(sweep: Sweep) -> Iterator[dict[str, Drawn]]:
    """All draws of a grid, the first parameter varying slowest; otherwise the corners of the space."""
    names = [parameter.name for parameter in sweep.parameters]
    if sweep.method == "grid":
        sides = [parameter.grid() for parameter in sweep.parameters]
    else:
        sides = [parameter.corners() for parameter in sweep.parameters]
    if sweep.method == "grid" or math.prod(map(len, sides)) <= MAX_CORNERS:
        yield from (dict(zip(names, drawn, strict=True)) for drawn in product(*sides))
        return
    first = {name: side[0] for name, side in zip(names, sides, strict=True)}
    yield first
    yield from (first | {name: drawn} for name, side in zip(names, sides, strict=True) for drawn in side[1:])


def only_adds(before: Any, sweep: Sweep) -> bool:
    """Whether a grid has all that its parameters had before, of which there are no more and no fewer."""
    varied, constants = parse_parameters(before)
    was = {parameter.name: parameter.grid() for parameter in varied}
    now = {parameter.name: parameter.grid() for parameter in sweep.parameters}
    if constants != sweep.constants or was.keys() != now.keys():
        return False
    return all(set(values) <= set(now[name]) for name, values in was.items())


def n_runs(sweep: Sweep, max_runs: int | None = None) -> int:
    """How many runs the sweep has: `max_runs`, or else its cap, and of a grid no more than its cells.

    Raises:
        ConfigError: it would never end.
    """
    bound = max_runs or sweep.run_cap
    if sweep.method == "grid":
        n_cells = math.prod(len(parameter.grid()) for parameter in sweep.parameters)
        return n_cells if bound is None else min(bound, n_cells)
    if bound is None:
        raise ConfigError(
            f"method={sweep.method} never ends by itself; give run_cap in the file, or --max-runs"
        )
    return bound
