"""What a cache kept of a rollout, and for how long: counts from the death table alone."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.ranks import ALONE, Ranks
from lit_rlkv.types import NEVER, Rollout


@dataclass(frozen=True)
class Lifetimes:
    """How long keys lived, by layer and KV head, over all sequences.

    A key lives from its own token to the first query that misses it, so a lifetime counts the queries that
    saw the key. The last token of a sequence was written and never read, and is no key.
    """

    evicted: Int[Tensor, "layer kv_head age"]
    """Keys that were evicted at each age in tokens."""
    n_kept: Int[Tensor, "layer kv_head"]
    """Keys that were still there when the response ended."""

    @property
    def n_evicted(self) -> Int[Tensor, "layer kv_head"]:
        return self.evicted.sum(dim=-1)

    @property
    def mean(self) -> Float[Tensor, "layer kv_head"]:
        """Tokens, of evicted keys; NaN where none was."""
        return mean_age(self.evicted)

    @property
    def median(self) -> Float[Tensor, "layer kv_head"]:
        """Tokens, of evicted keys; NaN where none was."""
        return median_age(self.evicted)


def mean_age(counts: Int[Tensor, "*lead age"]) -> Float[Tensor, "*lead"]:
    """Mean of the ages that were counted; NaN where there are none."""
    age = torch.arange(counts.shape[-1], device=counts.device)
    return (counts * age).sum(dim=-1).double() / counts.sum(dim=-1)


def median_age(counts: Int[Tensor, "*lead age"]) -> Float[Tensor, "*lead"]:
    """Median of the ages that were counted, the lower one of two; NaN where there are none."""
    so_far, n = counts.cumsum(dim=-1), counts.sum(dim=-1)
    is_reached = 2 * so_far >= n[..., None]
    return is_reached.int().argmax(dim=-1).double().masked_fill(n == 0, torch.nan)


def age_histogram(
    counts: Int[Tensor, " age"], max_bins: int
) -> tuple[Int[Tensor, " edge"], Int[Tensor, " bin"]]:
    """The counts in at most `max_bins` bins of neighbouring ages, the last up to the highest age counted.

    Bin i holds ages of at least edge[i] and below edge[i + 1]; ages begin at 1.
    """
    n_ages = int(counts.nonzero().max()) if bool(counts.any()) else 1
    width = -(-n_ages // max_bins)
    n_bins = -(-n_ages // width)
    counts = F.pad(counts[1 : n_ages + 1], (0, n_bins * width - n_ages))
    return 1 + width * torch.arange(n_bins + 1), counts.view(n_bins, width).sum(dim=1)


def lifetimes(rollout: Rollout, ranks: Ranks = ALONE) -> Lifetimes:
    """The ages at which keys were evicted; one layer at a time, because tables of all of them are large.

    Args:
        ranks: whose rollouts, of as many columns, are counted together.
    """
    n_layers, n_heads, seq = rollout.death.shape[1:]
    born = torch.arange(seq, device=rollout.death.device)
    is_key = rollout.is_token & (born < _last_column(rollout.is_token)[:, None])
    evicted = torch.zeros(n_layers, n_heads, seq + 1, dtype=torch.long, device=rollout.death.device)
    n_kept = evicted.new_zeros(n_layers, n_heads)
    for layer in range(n_layers):
        death = rollout.death[:, layer]
        is_evicted = is_key[:, None] & (death != NEVER)
        n_kept[layer] = (is_key[:, None] & (death == NEVER)).sum(dim=(0, 2))
        age = torch.where(is_evicted, death - born, 0).long().transpose(0, 1).flatten(1)
        evicted[layer].scatter_add_(1, age, is_evicted.transpose(0, 1).flatten(1).long())
    return Lifetimes(ranks.total(evicted), ranks.total(n_kept))


def retained(
    rollout: Rollout, ranks: Ranks = ALONE
) -> tuple[Float[Tensor, "layer kv_head"], Float[Tensor, "layer kv_head"]]:
    """Living keys over all keys so far: mean over queries, and mean over the last queries of responses.

    Queries are those that predicted an action.

    Args:
        ranks: whose rollouts are taken together.
    """
    is_query = predicts(rollout.is_action)
    is_last = is_query & ~predicts(is_query)
    n_born = rollout.is_token.long().cumsum(dim=1)
    of_queries, of_last = [], []
    for layer in range(rollout.death.shape[1]):
        fraction = live_keys(rollout, layer) / n_born[:, None].clamp(min=1)
        of_queries.append(_sum_over(fraction, is_query))
        of_last.append(_sum_over(fraction, is_last))

    def mean(sums: list[Tensor], is_counted: Tensor) -> Tensor:
        return ranks.total(torch.stack(sums)) / ranks.total(is_counted.sum()).clamp(min=1)

    return mean(of_queries, is_query), mean(of_last, is_last)


def affected(rollout: Rollout, ranks: Ranks = ALONE) -> Float[Tensor, ""]:
    """Share of actions that a query predicted which missed a key in some layer and KV head.

    Only these can differ from those of a policy with all keys by what was evicted.

    Args:
        ranks: whose rollouts are taken together.
    """
    seq = rollout.death.shape[-1]
    first = torch.full(rollout.death.shape[:1], NEVER, dtype=rollout.death.dtype, device=rollout.death.device)
    for layer in range(rollout.death.shape[1]):
        death = rollout.death[:, layer].masked_fill(~rollout.is_token[:, None], NEVER)
        first = torch.minimum(first, death.flatten(1).amin(dim=1))
    column = torch.arange(seq, device=rollout.death.device)
    is_affected = predicts(rollout.is_action) & (column >= first[:, None])
    return ranks.total(is_affected.sum()) / ranks.total(rollout.is_action.sum()).clamp(min=1)


def live_keys(rollout: Rollout, layer: int) -> Int[Tensor, "batch kv_head seq"]:
    """Keys of one layer born and not yet evicted at each column: births so far minus deaths so far."""
    death, seq = rollout.death[:, layer], rollout.death.shape[-1]
    is_key = rollout.is_token[:, None].expand_as(death).long()
    deaths = torch.zeros(*death.shape[:-1], seq + 1, dtype=torch.long, device=death.device)
    deaths.scatter_add_(-1, death.clamp(max=seq).long(), is_key)
    return rollout.is_token.long().cumsum(dim=1)[:, None] - deaths[..., :seq].cumsum(dim=-1)


def predicts(is_action: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    """True on the queries that predicted an action: each stands in the column before it."""
    return F.pad(is_action[:, 1:], (0, 1), value=False)


def _sum_over(
    values: Float[Tensor, "batch kv_head seq"], is_counted: Bool[Tensor, "batch seq"]
) -> Float[Tensor, " kv_head"]:
    return values.masked_fill(~is_counted[:, None], 0.0).sum(dim=(0, 2))


def _last_column(is_token: Bool[Tensor, "batch seq"]) -> Int[Tensor, " batch"]:
    """Where each sequence ends."""
    return (torch.arange(is_token.shape[1], device=is_token.device) * is_token).amax(dim=1)
