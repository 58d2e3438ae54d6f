"""Recorded cells of the ranking, added up over chunks of prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np
from ranking_parts.measure import N_BINS
from ranking_parts.setting import DTYPES, SLOTS
from ranking_parts.texts import TEXT

from lit_rlkv.evaluation.intervals import mean_interval
from lit_rlkv.evaluation.results import IntervalEstimate
from lit_rlkv.kvcache.policies import DENSE, UNTRAINED

Row = Mapping[str, Any]
POWER = 0.8
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
        """Return the bytes of a row's cache: `slots`, `record`, `beside`."""
        return sum(self.rows[0]["bytes"][part] for part in parts)


@dataclass(frozen=True)
class Results:
    """The rows of one model."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, rows: Sequence[Row], model: str | None = None) -> "Results":
        """Select the rows of one model; None: that of the first row."""
        model = model or (rows[0]["cell"]["model"] if rows else None)
        return cls(tuple(row for row in rows if row["cell"]["model"] == model))

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
        """True if every policy was measured here."""
        return set(self.groups(dtype, slots)) == set(UNTRAINED)

    def dense(self, dtype: str | None) -> Group | None:
        """Return the rows of the cache that evicts nothing; None if there are none."""
        found = [row for row in self.rows if (row["cell"]["policy"], row["cell"]["dtype"]) == (DENSE, dtype)]
        return Group(tuple(found)) if found else None

    @property
    def places(self) -> list[tuple[int, str | None]]:
        """Sizes and dtypes in which every policy was measured."""
        return [(slots, dtype) for slots in self.sizes for dtype in DTYPES if self.is_whole(dtype, slots)]


def difference(first: Group, second: Group) -> IntervalEstimate:
    """Return the mean over prompts of the second KL − the first, with Student's interval."""
    return mean_interval([b - a for a, b in zip(first.by_prompt, second.by_prompt, strict=True)])


def prompts_needed(first: Group, second: Group, level: float = 0.95) -> int | None:
    """Return the prompts for which a test of this paired difference has `POWER`; None if it is not above 0.

    n = ((z₁₋ₐ⸝₂ + z_power) s / m)², by the mean and standard deviation of the differences measured.
    """
    differences = [b - a for a, b in zip(first.by_prompt, second.by_prompt, strict=True)]
    mean, normal = fmean(differences), NormalDist()
    if mean <= 0:
        return None
    z = normal.inv_cdf((1 + level) / 2) + normal.inv_cdf(POWER)
    return ceil((z * stdev(differences) / mean) ** 2)
