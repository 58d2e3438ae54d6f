"""Counts from the eviction table: retained keys, lifetimes of keys, affected response tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.distributed.ranks import SINGLE_PROCESS, Ranks
from lit_rlkv.types import NEVER, Rollout


@dataclass(frozen=True)
class Lifetimes:
    """Lifetimes of keys by layer and KV head, over all sequences.

    A key lives from its own token to the first query that misses it, so a lifetime counts the queries that
    saw the key. The last token of a sequence was written and never read, and is not counted as a key.
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
    """Return the mean of the counted ages; NaN if there are none."""
    age = torch.arange(counts.shape[-1], device=counts.device)
    return (counts * age).sum(dim=-1).double() / counts.sum(dim=-1)


def median_age(counts: Int[Tensor, "*lead age"]) -> Float[Tensor, "*lead"]:
    """Return the (lower) median of the counted ages; NaN if there are none."""
    so_far, n = counts.cumsum(dim=-1), counts.sum(dim=-1)
    is_reached = 2 * so_far >= n[..., None]
    return is_reached.int().argmax(dim=-1).double().masked_fill(n == 0, torch.nan)


def age_histogram(
    counts: Int[Tensor, " age"], max_bins: int
) -> tuple[Int[Tensor, " edge"], Int[Tensor, " bin"]]:
    """Return the counts in at most `max_bins` bins of neighbouring ages, up to the highest counted age.

    Bin i holds ages of at least edge[i] and below edge[i + 1]; ages begin at 1.
    """
    n_ages = int(counts.nonzero().max()) if bool(counts.any()) else 1
    width = -(-n_ages // max_bins)
    n_bins = -(-n_ages // width)
    counts = F.pad(counts[1 : n_ages + 1], (0, n_bins * width - n_ages))
    return 1 + width * torch.arange(n_bins + 1), counts.view(n_bins, width).sum(dim=1)


def lifetimes(rollout: Rollout, ranks: Ranks = SINGLE_PROCESS) -> Lifetimes:
    """Return the lifetimes of keys; computed one layer at a time to save memory.

    Args:
        ranks: counts are summed over the rollouts of these ranks, which have as many columns.
    """
    n_layers, n_heads, seq = rollout.evicted_at.shape[1:]
    born = torch.arange(seq, device=rollout.evicted_at.device)
    is_key = rollout.attention_mask & (born < _last_column(rollout.attention_mask)[:, None])
    evicted = torch.zeros(n_layers, n_heads, seq + 1, dtype=torch.long, device=rollout.evicted_at.device)
    n_kept = evicted.new_zeros(n_layers, n_heads)
    for layer in range(n_layers):
        evicted_at = rollout.evicted_at[:, layer]
        is_evicted = is_key[:, None] & (evicted_at != NEVER)
        n_kept[layer] = (is_key[:, None] & (evicted_at == NEVER)).sum(dim=(0, 2))
        age = torch.where(is_evicted, evicted_at - born, 0).long().transpose(0, 1).flatten(1)
        evicted[layer].scatter_add_(1, age, is_evicted.transpose(0, 1).flatten(1).long())
    return Lifetimes(ranks.all_reduce_sum(evicted), ranks.all_reduce_sum(n_kept))


def retained_fraction(
    rollout: Rollout, ranks: Ranks = SINGLE_PROCESS
) -> tuple[Float[Tensor, "layer kv_head"], Float[Tensor, "layer kv_head"]]:
    """Return cached keys / keys so far: mean over queries, and mean over the last queries of responses.

    Queries are the ones that predicted a response token.

    Args:
        ranks: the result covers the rollouts of these ranks.
    """
    is_query = response_queries(rollout.response_mask)
    is_last = is_query & ~response_queries(is_query)
    n_born = rollout.attention_mask.long().cumsum(dim=1)
    of_queries, of_last = [], []
    for layer in range(rollout.evicted_at.shape[1]):
        fraction = cached_keys(rollout, layer) / n_born[:, None].clamp(min=1)
        of_queries.append(_sum_over(fraction, is_query))
        of_last.append(_sum_over(fraction, is_last))

    def mean(sums: list[Tensor], is_counted: Tensor) -> Tensor:
        return ranks.all_reduce_sum(torch.stack(sums)) / ranks.all_reduce_sum(is_counted.sum()).clamp(min=1)

    return mean(of_queries, is_query), mean(of_last, is_last)


def affected_fraction(rollout: Rollout, ranks: Ranks = SINGLE_PROCESS) -> Float[Tensor, ""]:
    """Return the share of response tokens whose query missed a key in some layer and KV head.

    Only these can differ from the tokens of a policy with all keys.

    Args:
        ranks: the result covers the rollouts of these ranks.
    """
    seq = rollout.evicted_at.shape[-1]
    first = torch.full(
        rollout.evicted_at.shape[:1], NEVER, dtype=rollout.evicted_at.dtype, device=rollout.evicted_at.device
    )
    for layer in range(rollout.evicted_at.shape[1]):
        evicted_at = rollout.evicted_at[:, layer].masked_fill(~rollout.attention_mask[:, None], NEVER)
        first = torch.minimum(first, evicted_at.flatten(1).amin(dim=1))
    column = torch.arange(seq, device=rollout.evicted_at.device)
    is_affected = response_queries(rollout.response_mask) & (column >= first[:, None])
    return ranks.all_reduce_sum(is_affected.sum()) / ranks.all_reduce_sum(rollout.response_mask.sum()).clamp(
        min=1
    )


def cached_keys(rollout: Rollout, layer: int) -> Int[Tensor, "batch kv_head seq"]:
    """Return the cached keys of one layer at each column: keys written minus keys evicted so far."""
    evicted_at, seq = rollout.evicted_at[:, layer], rollout.evicted_at.shape[-1]
    is_key = rollout.attention_mask[:, None].expand_as(evicted_at).long()
    evictions = torch.zeros(*evicted_at.shape[:-1], seq + 1, dtype=torch.long, device=evicted_at.device)
    evictions.scatter_add_(-1, evicted_at.clamp(max=seq).long(), is_key)
    return rollout.attention_mask.long().cumsum(dim=1)[:, None] - evictions[..., :seq].cumsum(dim=-1)


def response_queries(response_mask: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    """True on the queries that predicted a response token, one column before it."""
    return F.pad(response_mask[:, 1:], (0, 1), value=False)


def _sum_over(
    values: Float[Tensor, "batch kv_head seq"], is_counted: Bool[Tensor, "batch seq"]
) -> Float[Tensor, " kv_head"]:
    return values.masked_fill(~is_counted[:, None], 0.0).sum(dim=(0, 2))


def _last_column(attention_mask: Bool[Tensor, "batch seq"]) -> Int[Tensor, " batch"]:
    """Return the last token's column of each sequence."""
    return (torch.arange(attention_mask.shape[1], device=attention_mask.device) * attention_mask).amax(dim=1)
