"""Cache statistics of a rollout: retained keys, lifetimes, attention on evicted keys."""

from jaxtyping import Float, Int
from torch import Tensor

from lit_rlkv.callbacks.diagnostic import RowsDiagnostic
from lit_rlkv.diagnostics.distributions import evenly_spaced_rows
from lit_rlkv.diagnostics.evictions import (
    EvictedAttention,
    lifetimes,
    mean_age,
    median_age,
    retained_fraction,
)
from lit_rlkv.diagnostics.position_bins import bin_starts
from lit_rlkv.experience.batch import Experience
from lit_rlkv.models.backbone import hidden_states, token_positions
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.settings import Fraction, PositiveInt, dataclass
from lit_rlkv.types import Rollout

WITHOUT_EVICTIONS = {
    "kv/attention_kept": 1.0,
    "kv/attention_kept_p05": 1.0,
    "kv/attention_on_dead": 0.0,
    "kv/needs_dead_key": 0.0,
    "kv/dead_key_on_top": 0.0,
}
"""Attention metrics of a cache that evicted nothing."""


@dataclass(eq=False)
class CacheStatistics(RowsDiagnostic):
    """`kv/*`: retained keys and lifetimes of the rollout, and attention on evicted keys of some responses.

    Attention is measured in one dense forward of `n_rows` responses by the policy before its update. A
    rollout without evictions needs no forward: everything is retained. Each rank measures the attention of
    its own responses, because percentiles cannot be summed over ranks.
    """

    name = "cache"
    n_rows: PositiveInt = 8
    """evenly spaced responses in the dense forward, at most `tokens_per_pass` tokens"""
    needed: Fraction = 0.1
    """attention on one evicted key from which a query counts as needing it"""

    def measure(self, experience: Experience) -> None:
        rollout = experience.rollout
        fraction, at_last = retained_fraction(rollout, experience.ranks)
        evicted, kept = lifetimes(rollout, experience.ranks)
        n_kept, n_evicted = int(kept.sum()), int(evicted.sum())
        self.scalars = {
            "kv/retained": float(fraction.mean()),
            "kv/retained_last": float(at_last.mean()),
            "kv/never_evicted": n_kept / max(n_kept + n_evicted, 1),
        }
        if n_evicted > 0:
            self._add_lifetimes(evicted)
            n_rows = min(self.n_rows, max(self.tokens_per_pass // rollout.input_ids.shape[1], 1))
            self._add_attention(rollout.rows(evenly_spaced_rows(rollout, n_rows)))
        else:
            self.scalars |= WITHOUT_EVICTIONS

    def _add_lifetimes(self, evicted: Int[Tensor, "layer kv_head age"]) -> None:
        counts_by_age = evicted.sum(dim=(0, 1))
        self.scalars["kv/lifetime_mean"] = float(mean_age(counts_by_age))
        self.scalars["kv/lifetime_median"] = float(median_age(counts_by_age))

    def _add_attention(self, rollout: Rollout) -> None:
        attention = EvictedAttention(rollout, self.needed)
        with acting_as(self.policy.roles, "policy") as backbone:
            hidden_states(
                backbone,
                rollout.input_ids[:, :-1],
                token_positions(rollout.attention_mask)[:, :-1],
                record=rollout.record.view(rollout.attention_mask, shadow=False).until(-1),
                probe=attention,
            )
        kept = attention.stacked("kept")
        self.scalars |= {
            "kv/attention_kept": float(kept.mean()),
            "kv/attention_kept_p05": float(attention.kept_p05),
            "kv/attention_on_dead": float(1 - kept.mean()),
            "kv/needs_dead_key": float(attention.stacked("needs_dead").mean()),
            "kv/dead_key_on_top": float(attention.stacked("dead_on_top").mean()),
        }
        self.arrays = {
            "position": bin_starts(rollout.response_mask).tolist(),
            "attention_on_dead": _plain(attention.stacked("on_dead")),
        }


def _plain(table: Float[Tensor, "layer entry"]) -> list[list[float | None]]:
    """Return a table for JSON, with None in place of NaN."""
    return [[None if value != value else round(value, 6) for value in row] for row in table.tolist()]
