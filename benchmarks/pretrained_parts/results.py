"""Recorded cells of the pretrained benchmark, added up over chunks of prompts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np
from pretrained_parts.answers import POSITIONS
from pretrained_parts.setting import DENSE, KINDS

from lit_rlkv.evaluation.intervals import mean_interval, wilson
from lit_rlkv.evaluation.results import IntervalEstimate
from lit_rlkv.kvcache.policies import POLICIES

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """The rows of one kind of prompts, policy and budget."""

    rows: tuple[Row, ...]

    def total(self, name: str) -> float:
        """Return the sum over chunks."""
        return sum(row[name] for row in self.rows)

    @property
    def n_prompts(self) -> int:
        return sum(row["cell"]["rows"] for row in self.rows)

    @property
    def accuracy(self) -> IntervalEstimate | None:
        """Share of right answers with its Wilson interval; None for chats."""
        right = [one for row in self.rows for one in row["right"] or []]
        return wilson(sum(right) / len(right), len(right)) if right else None

    @property
    def perplexity(self) -> float:
        """exp of the mean −log-prob of the dense model's response under this cache."""
        return exp(self.total("nll") / self.total("n_tokens"))

    @property
    def kl(self) -> float:
        """Mean KL(μ ‖ dense) of a token in nats."""
        return sum(self._kl_sums()) / self.total("n_tokens")

    @property
    def kl_interval(self) -> IntervalEstimate | None:
        """Mean over prompts of the KL per token, with Student's interval; None if prompts are not known."""
        if not all("kl_by_prompt" in row for row in self.rows):
            return None
        sums = [one for row in self.rows for one in row["kl_by_prompt"]]
        counts = [one for row in self.rows for one in row["n_by_prompt"]]
        return mean_interval([total / n for total, n in zip(sums, counts, strict=True)])

    @property
    def kl_by_position(self) -> list[float]:
        """Mean KL in each bin of `POSITIONS`; NaN for a bin without tokens."""
        counts = np.sum([row["kl_n"] for row in self.rows], axis=0)
        sums = np.array(self._kl_sums())
        return [total / n if n else float("nan") for total, n in zip(sums, counts, strict=True)]

    @property
    def overlap_p05(self) -> float:
        """5th percentile over tokens of Σ_v min(μ_v, π_v)."""
        return float(np.quantile([one for row in self.rows for one in row["overlap"]], 0.05))

    def _kl_sums(self) -> list[float]:
        return np.sum([row["kl"] for row in self.rows], axis=0).tolist()


@dataclass(frozen=True)
class Results:
    """The rows of one model, those of the latest row; chunks that are not finished are left out."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Results":
        """Select rows of one model, and of each kind the chunks that have the most cells."""
        model = rows[-1]["cell"]["model"] if rows else None
        mine = [row for row in rows if row["cell"]["model"] == model]
        sizes = Counter((row["cell"]["block"], row["cell"]["chunk"]) for row in mine)
        most = {
            kind: max((n for (block, _), n in sizes.items() if block == kind), default=0) for kind in KINDS
        }
        kept = [
            row
            for row in mine
            if (block := row["cell"]["block"]) not in KINDS
            or sizes[block, row["cell"]["chunk"]] == most[block]
        ]
        return cls(tuple(kept))

    @property
    def budgets(self) -> list[int]:
        """Budgets of the prompts that were measured, ascending."""
        found = {row["cell"]["budget"] for row in self.rows if row["cell"]["block"] in KINDS}
        return sorted(found - {None})

    @property
    def policies(self) -> list[str]:
        """Policies that were measured, in the order of `POLICIES`."""
        found = {row["cell"]["policy"] for row in self.rows}
        return [policy for policy in POLICIES if policy in found]

    @property
    def profiled(self) -> list[str]:
        """Policies with a budget profile that were measured, as `POLICY+PROFILE`."""
        return sorted({policy for row in self.rows if "+" in (policy := row["cell"]["policy"])})

    def group(self, kind: str, policy: str, budget: int | None) -> Group | None:
        """Return the rows of one place; None if there are none."""
        wanted = (kind, policy, budget)
        found = [row for row in self.rows if _place(row) == wanted]
        return Group(tuple(found)) if found else None

    def dense(self, kind: str) -> Group | None:
        """Return the rows of the model with all keys."""
        return self.group(kind, DENSE, None)

    def rollout(self, block: str, policy: str) -> Row | None:
        """Return the latest rollout of a block and policy; None if there is none."""
        found = [row for row in self.rows if _place(row)[:2] == (block, policy)]
        return found[-1] if found else None

    def rollouts(self, block: str) -> dict[str, Row]:
        """Return the latest rollout of a block for each policy that has one, without dense."""
        return {policy: row for policy in self.policies if (row := self.rollout(block, policy))}


def _place(row: Row) -> tuple[str, str, int | None]:
    cell = row["cell"]
    return cell["block"], cell["policy"], cell["budget"]


def bin_labels() -> list[str]:
    """Return the response positions of each bin, counted from 1."""
    ends = [*POSITIONS[1:], None]
    return [_label(start + 1, end) for start, end in zip(POSITIONS, ends, strict=True)]


def _label(first: int, last: int | None) -> str:
    if last is None:
        return f"{first}+"
    return str(first) if first == last else f"{first}–{last}"
