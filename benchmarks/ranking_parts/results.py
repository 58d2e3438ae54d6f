"""Recorded cells of the ranking, added up over chunks of prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from statistics import fmean, stdev
from typing import Any

import numpy as np
from ranking_parts.measure import N_BINS
from ranking_parts.setting import DTYPES, SLOTS
from ranking_parts.texts import TEXT

from lit_rlkv.evaluation.intervals import mean_interval, t_quantile
from lit_rlkv.evaluation.results import IntervalEstimate
from lit_rlkv.settings import DENSE

Row = Mapping[str, Any]
PARTS = ("slots", "record", "beside")
"""Bytes of a row by what they are for."""
POWER = 0.8
MOST_PROMPTS = 1000
FIRST = 3
"""Policies that are compared with the middle one."""


@dataclass(frozen=True)
class Group:
    """The rows of one cache, over chunks of prompts."""

    rows: tuple[Row, ...]

    @property
    def by_prompt(self) -> list[float]:
        """KL(π ‖ μ) per token of each prompt, over the model's own words."""
        return [one for row in self.rows for one in row["kl"][TEXT]]

    @property
    def kl(self) -> IntervalEstimate:
        """Mean over prompts with Student's interval."""
        return mean_interval(self.by_prompt)

    def recalled(self, name: str) -> tuple[int, int]:
        """Return the values recalled right, and all that were asked for."""
        found = [one for row in self.rows for prompt in row["recall"][name]["right"] for one in prompt]
        return sum(found), len(found)

    @property
    def overlap_p05(self) -> float:
        """5th percentile of the overlap over all tokens, to the width of a bin."""
        counts = np.sum([row["overlap"] for row in self.rows], axis=0)
        return int(np.searchsorted(np.cumsum(counts), 0.05 * counts.sum())) / N_BINS

    def along(self, name: str) -> list[float]:
        """Return the mean over chunks in each bin of response tokens."""
        return np.mean([row["along"][name] for row in self.rows], axis=0).tolist()

    def n_bytes(self, *parts: str) -> int:
        """Return the bytes of these `PARTS` of a row."""
        return sum(self.rows[0]["bytes"][part] for part in parts)


@dataclass(frozen=True)
class Results:
    """The rows of one model."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, rows: Sequence[Row], model: str | None = None, *, options: bool = False) -> "Results":
        """Select the rows of one model (None: that of the first row), without or with options of policies."""
        model = model or (rows[0]["cell"]["model"] if rows else None)
        own = (row for row in rows if row["cell"]["model"] == model)
        return cls(tuple(row for row in own if (" " in row["cell"]["policy"]) == options))

    @property
    def sizes(self) -> list[int]:
        """Sizes that were measured, ascending."""
        return sorted({row["cell"]["slots"] for row in self.rows} - {None})

    def groups(self, dtype: str | None, slots: int, counted: str = SLOTS) -> dict[str, Group]:
        """Return the policies of one place, lowest KL first, on the chunks that all of them have."""
        found: dict[str, dict[int, Row]] = {}
        for row in self.rows:
            cell = row["cell"]
            if (cell["dtype"], cell["slots"], cell["counted"]) == (dtype, slots, counted):
                found.setdefault(cell["policy"], {})[cell["chunk"]] = row
        shared = set.intersection(*map(set, found.values())) if found else set()
        groups = {
            policy: Group(tuple(rows[chunk] for chunk in sorted(shared)))
            for policy, rows in found.items()
            if shared
        }
        return dict(sorted(groups.items(), key=lambda each: each[1].kl.value))

    def is_whole(self, dtype: str | None, slots: int) -> bool:
        """True if every policy of this model was measured here."""
        policies = {row["cell"]["policy"] for row in self.rows} - {DENSE}
        return set(self.groups(dtype, slots)) == policies

    def dense(self, dtype: str | None) -> Group | None:
        """Return the rows of the cache that evicts nothing; None if there are none."""
        found = [row for row in self.rows if (row["cell"]["policy"], row["cell"]["dtype"]) == (DENSE, dtype)]
        return Group(tuple(found)) if found else None

    @property
    def places(self) -> list[tuple[int, str | None]]:
        """Sizes and dtypes in which every policy was measured."""
        return [(slots, dtype) for slots in self.sizes for dtype in DTYPES if self.is_whole(dtype, slots)]


def difference(first: Sequence[float], second: Sequence[float]) -> IntervalEstimate:
    """Return the mean over prompts of the second KL − the first, with Student's interval."""
    return mean_interval([b - a for a, b in zip(first, second, strict=True)])


def prompts_needed(first: Sequence[float], second: Sequence[float], level: float = 0.95) -> int | None:
    """Return the prompts for which a test of this paired difference has `POWER`; None if it is not above 0.

    The smallest n of at least ((t_{1−α/2} + t_power) s / m)², with Student's quantiles of n − 1 degrees of
    freedom, by the mean m and standard deviation s of the differences measured.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    mean = fmean(differences)
    if mean <= 0:
        return None
    effect = stdev(differences) / mean

    def enough(n: int) -> bool:
        t = t_quantile(level, n - 1) + t_quantile(2 * POWER - 1, n - 1)
        return n >= (t * effect) ** 2

    return next((n for n in range(2, MOST_PROMPTS) if enough(n)), MOST_PROMPTS)


def plain_at(results: Results, policy: str, n_bytes: int) -> list[float] | None:
    """Return the KL of each prompt in 16 bit at so many bytes of all that a sequence keeps.

    Between two sizes measured its logarithm is interpolated by that of the bytes; None outside of them.
    """
    found = [each[policy] for slots in results.sizes if policy in (each := results.groups(None, slots))]
    for low, high in pairwise(found):
        ends = [group.n_bytes(*PARTS) for group in (low, high)]
        if ends[0] <= n_bytes <= ends[1]:
            share = log(n_bytes / ends[0]) / log(ends[1] / ends[0])
            pairs = zip(low.by_prompt, high.by_prompt, strict=True)
            return [a ** (1 - share) * b**share for a, b in pairs]
    return None
