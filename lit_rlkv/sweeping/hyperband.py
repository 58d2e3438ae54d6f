"""Which runs to stop early: W&B's rule for `early_terminate: {type: hyperband}` (arXiv:1603.06560).

Brackets are read as W&B documents them. Its own code (hyperband_stopping.py in github.com/wandb/sweeps)
counts them from 0, and so judges one logged value later.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rlkv.config import ConfigError


@dataclass(frozen=True)
class Hyperband:
    """Stops a run at a bracket where it is not among the best 1/eta of all that came so far.

    Brackets are numbers of logged values of the metric: `min_iter`, `min_iter`·eta, ...; or, given
    `max_iter`, its `s` quotients `max_iter`/eta, `max_iter`/eta², ...
    """

    min_iter: int | None = None
    max_iter: int | None = None
    s: int | None = None
    eta: float | int = 3
    is_strict: bool = False
    """Judge by the value at the bracket; otherwise by the best so far, so that fewer runs are stopped."""

    def brackets(self) -> Iterator[int]:
        """In ascending order; without end for `min_iter`."""
        if self.min_iter is not None:
            length = float(self.min_iter)
            while True:
                yield int(length)
                length *= self.eta
        assert self.max_iter is not None
        assert self.s is not None
        lengths = [int(self.max_iter / self.eta**power) for power in range(self.s, 0, -1)]
        yield from (length for length in lengths if length >= 1)

    def bracket_of(self, n_values: int) -> int | None:
        """The highest bracket that a run has reached; None before the first."""
        reached = None
        for bracket in self.brackets():
            if bracket > n_values:
                break
            reached = bracket
        return reached

    def stops(self, costs: Sequence[float], rivals: Sequence[Sequence[float]]) -> int | None:
        """The bracket at which this run is to be stopped, None while it may go on.

        The threshold is the value at position n/eta, rounded down, of the n sorted values at the bracket; a
        run that equals it goes on, so the first to arrive always does.

        Args:
            costs: of this run, one for each logged value, lower is better; not a number counts as the worst.
            rivals: the same of all other runs, those that have ended among them.
        """
        bracket = self.bracket_of(len(costs))
        if bracket is None:
            return None
        own = [_finite(cost) for cost in costs]
        others = [_finite(rival[bracket - 1]) for rival in rivals if len(rival) >= bracket]
        ranked = sorted([own[bracket - 1], *others])
        threshold = ranked[int(len(ranked) / self.eta)]
        judged = own[bracket - 1] if self.is_strict else min(own)
        return bracket if judged > threshold else None


def _finite(cost: float) -> float:
    return math.inf if math.isnan(cost) else cost


TAKES: dict[str, type | tuple[type, ...]] = {
    "min_iter": int,
    "max_iter": int,
    "s": int,
    "eta": (int, float),
    "strict": bool,
}
"""Options of W&B's hyperband."""


def parse_hyperband(node: Any) -> Hyperband | None:
    """The `early_terminate` of a sweep file; None where it has none.

    Raises:
        ConfigError: another type than hyperband, or options that make no brackets.
    """
    if node is None:
        return None
    if not isinstance(node, Mapping) or node.get("type") != "hyperband":
        raise ConfigError(f"early_terminate={node!r}: the only type is hyperband; give type: hyperband")
    options = {key: value for key, value in node.items() if key != "type"}
    for key, value in options.items():
        if key not in TAKES:
            raise ConfigError(f"early_terminate: unexpected {key!r}; it takes type, {', '.join(TAKES)}")
        is_right = isinstance(value, TAKES[key]) and isinstance(value, bool) == (key == "strict")
        if not is_right or (key != "strict" and value <= 0):
            raise ConfigError(
                f"early_terminate.{key}={value!r} makes no sense; "
                f"give {'true or false' if key == 'strict' else 'a number above 0'}"
            )
    if options.keys() & {"min_iter", "max_iter", "s"} not in ({"min_iter"}, {"max_iter", "s"}):
        raise ConfigError(
            f"early_terminate={options}: brackets are set by min_iter alone, or by max_iter with s"
        )
    is_strict = options.pop("strict", False)
    hyperband = Hyperband(**options, is_strict=is_strict)
    if hyperband.eta <= 1:
        raise ConfigError(f"early_terminate.eta={hyperband.eta} stops nothing; give more than 1")
    if next(hyperband.brackets(), None) is None:
        raise ConfigError(f"early_terminate.max_iter={hyperband.max_iter} is below eta; raise it")
    return hyperband
