"""Early stopping by W&B's `early_terminate: {type: hyperband}` (arXiv:1603.06560).

Optuna's pruners are not used: they compare with runs that have ended at a rung, W&B with the value at
position n/eta of all runs that reached the bracket. Brackets are those that W&B documents; its own code
(hyperband_stopping.py in github.com/wandb/sweeps) counts them from 0, so it judges one logged value later.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lit_rlkv.checks import Number
from lit_rlkv.config import require
from lit_rlkv.config.options import option


@dataclass(frozen=True, kw_only=True)
class Hyperband:
    """Stops a run that is not among the best 1/eta of all runs that reached a bracket.

    Brackets are numbers of logged values of the metric: `min_iter`, `min_iter`·eta, ..., or the `s` quotients
    `max_iter`/eta, `max_iter`/eta², ...
    """

    type: Literal["hyperband"] = option("hyperband", "the only type")
    min_iter: int | None = option(None, "first bracket, in logged values", least=1)
    max_iter: int | None = option(None, "end of the brackets, in logged values; needs s", least=1)
    s: int | None = option(None, "number of brackets below max_iter", least=1)
    eta: Number = option(3, "ratio of brackets, and of runs to those that continue", above=1)
    strict: bool = option(False, "judge by the value at the bracket, not by the best so far")

    def __post_init__(self) -> None:
        given = [name for name in ("min_iter", "max_iter", "s") if getattr(self, name) is not None]
        require(
            given in (["min_iter"], ["max_iter", "s"]),
            f"early_terminate: brackets are set by min_iter alone, or by max_iter with s, got {given}",
        )
        require(
            next(self.brackets(), None) is not None,
            f"early_terminate.max_iter must be at least eta={self.eta}, got {self.max_iter}; raise it",
        )

    def brackets(self) -> Iterator[int]:
        """Yield the brackets in ascending order, without end for `min_iter`."""
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
        """Return the highest bracket that a run has reached; None before the first."""
        reached = None
        for bracket in self.brackets():
            if bracket > n_values:
                break
            reached = bracket
        return reached

    def stops(self, costs: Sequence[float], rivals: Sequence[Sequence[float]]) -> int | None:
        """Return the bracket at which to stop this run; None while it may continue.

        The threshold is the value at position n/eta, rounded down, of the n sorted values at the bracket. A
        run equal to it continues, so the first to arrive always does.

        Args:
            costs: one for each logged value of this run, lower is better; NaN counts as the worst.
            rivals: the same of all other runs, ended or not.
        """
        bracket = self.bracket_of(len(costs))
        if bracket is None:
            return None
        own = [_without_nan(cost) for cost in costs]
        others = [_without_nan(rival[bracket - 1]) for rival in rivals if len(rival) >= bracket]
        ranked = sorted([own[bracket - 1], *others])
        judged = own[bracket - 1] if self.strict else min(own)
        return bracket if judged > ranked[int(len(ranked) / self.eta)] else None


def _without_nan(cost: float) -> float:
    return math.inf if math.isnan(cost) else cost
