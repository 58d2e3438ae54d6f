"""eviction tables as h2o leaves them, without a model: heavy hitters, recency, sinks and a window."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

NEVER = torch.iinfo(torch.int32).max
IMPORTANCE_SIGMA = 2.0
"""Standard deviation of a key's log-normal weight; the heaviest of 100 gets a fifth of all attention."""
DRIFT_SIGMA = 1.0
"""Standard deviation of the log-normal factor that changes the weights between intervals."""
RECENT = 64.0
"""Age in tokens at which a key's share by recency has halved."""


@dataclass(frozen=True)
class Schedule:
    """Cache and schedule of the simulated sampler."""

    budget: int
    interval: int = 128
    sink: int = 4
    window: int = 32
    prompt: int = 256
    """Tokens prefilled densely, and compacted at once where they exceed the budget."""

    def compactions(self, seq: int) -> Iterator[int]:
        """Yield the tokens seen at each compaction before the sequence ends, the column of its evictions."""
        n_intervals = (self.budget - self.prompt) // self.interval + 1  # until there are more than the budget
        now = self.prompt + max(0, n_intervals) * self.interval
        while now < seq:
            yield now
            now += self.interval


def simulate_evictions(
    lead: Sequence[int], seq: int, schedule: Schedule, seed: int = 0
) -> Int[Tensor, "*lead seq"]:
    """Return the eviction table for every (batch, layer, KV head) of `lead`, on the CPU, fixed by the seed.

    The attention that a key receives is its weight, drawn once from a heavy tail, times a recency that decays
    with its age, times what drifts from interval to interval, as a share of all living keys. Its score is the
    sum since its birth, as h2o accumulates it; every KV head draws for itself.
    """
    n_rows = torch.Size(lead).numel()
    draw = torch.Generator().manual_seed(seed)
    weight = (torch.randn(n_rows, seq, generator=draw) * IMPORTANCE_SIGMA).exp()
    evicted_at = torch.full((n_rows, seq), NEVER, dtype=torch.int32)
    columns, score = torch.empty(n_rows, 0, dtype=torch.int64), torch.empty(n_rows, 0)
    n_seen = 0
    for now in schedule.compactions(seq):
        born = torch.arange(n_seen, now).expand(n_rows, -1)
        columns = torch.cat([columns, born], dim=1)
        received = _received(weight.gather(1, columns), columns, now, draw) * (now - n_seen)
        score = torch.nn.functional.pad(score, (0, born.shape[1])) + received
        kept = _survivors(score, columns, now, schedule)
        is_dead = torch.ones_like(columns, dtype=torch.bool).scatter(1, kept, False)
        evicted_at.scatter_(1, columns, torch.where(is_dead, now, NEVER).int())
        columns, score, n_seen = columns.gather(1, kept), score.gather(1, kept), now
    return evicted_at.view(*lead, seq)


def _received(
    weight: Float[Tensor, "row slot"], columns: Int[Tensor, "row slot"], now: int, draw: torch.Generator
) -> Float[Tensor, "row slot"]:
    """Share of each living key in the attention of a query of the interval that ends at `now`."""
    recency = 1.0 / (1.0 + (now - columns) / RECENT)
    drift = (torch.randn(weight.shape, generator=draw) * DRIFT_SIGMA).exp()
    mass = weight * recency * drift
    return mass / mass.sum(1, keepdim=True)


def _survivors(
    score: Float[Tensor, "row slot"], columns: Int[Tensor, "row slot"], now: int, schedule: Schedule
) -> Int[Tensor, "row kept"]:
    is_protected = (columns < schedule.sink) | (columns >= now - schedule.window)
    score = score.masked_fill(is_protected, torch.inf)
    return score.topk(schedule.budget, dim=1).indices.sort(dim=1).values


def n_visible(evicted_at: Int[Tensor, "*lead seq"]) -> int:
    """Pairs of a query and a key that it sees, of all tables."""
    seq = evicted_at.shape[-1]
    born = torch.arange(seq, device=evicted_at.device)
    return int((evicted_at.long().clamp(max=seq) - born).clamp(min=0).sum())
