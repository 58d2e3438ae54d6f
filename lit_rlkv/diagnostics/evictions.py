"""Statistics of evictions: retained keys, lifetimes, affected tokens, dense attention on evicted keys."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.diagnostics.position_bins import by_position
from lit_rlkv.distributed.ranks import SINGLE_PROCESS, Ranks
from lit_rlkv.kernels.backend import to_autocast_dtype
from lit_rlkv.models.attention import AttentionInputs
from lit_rlkv.types import NEVER, Rollout


def mean_age(counts: Int[Tensor, "*lead age"]) -> Float[Tensor, "*lead"]:
    """Return the mean of the counted ages; NaN if there are none."""
    age = torch.arange(counts.shape[-1], device=counts.device)
    return (counts * age).sum(dim=-1).double() / counts.sum(dim=-1)


def median_age(counts: Int[Tensor, "*lead age"]) -> Float[Tensor, "*lead"]:
    """Return the (lower) median of the counted ages; NaN if there are none."""
    so_far, n = counts.cumsum(dim=-1), counts.sum(dim=-1)
    is_reached = 2 * so_far >= n[..., None]
    return is_reached.int().argmax(dim=-1).double().masked_fill(n == 0, torch.nan)


def lifetimes(
    rollout: Rollout, ranks: Ranks = SINGLE_PROCESS
) -> tuple[Int[Tensor, "layer kv_head age"], Int[Tensor, "layer kv_head"]]:
    """Return the number of keys evicted at each age in tokens, and of keys kept to the end of the response.

    The age of a key at its eviction is the number of queries that saw it. The last token of a sequence is
    written but never read, and does not count as a key. Computed one layer at a time to save memory.

    Args:
        ranks: counts are summed over the rollouts of these ranks, which must have equally many columns.
    """
    n_layers, n_heads, seq = rollout.record.evicted_at.shape[1:]
    born = torch.arange(seq, device=rollout.input_ids.device)
    is_key = rollout.attention_mask & response_queries(rollout.attention_mask)
    evicted = torch.zeros(n_layers, n_heads, seq + 1, dtype=torch.long, device=born.device)
    n_kept = evicted.new_zeros(n_layers, n_heads)
    for layer in range(n_layers):
        evicted_at = rollout.evictions(layer)
        is_evicted = is_key[:, None] & (evicted_at != NEVER)
        n_kept[layer] = (is_key[:, None] & (evicted_at == NEVER)).sum(dim=(0, 2))
        age = torch.where(is_evicted, evicted_at - born, 0).long().transpose(0, 1).flatten(1)
        evicted[layer].scatter_add_(1, age, is_evicted.transpose(0, 1).flatten(1).long())
    return ranks.all_reduce_sum(evicted), ranks.all_reduce_sum(n_kept)


def retained_fraction(
    rollout: Rollout, ranks: Ranks = SINGLE_PROCESS
) -> tuple[Float[Tensor, "layer kv_head"], Float[Tensor, "layer kv_head"]]:
    """Return cached keys / keys so far: mean over queries, and mean over the last queries of responses.

    Only queries that predicted a response token count, of the rollouts of all `ranks`.
    """
    is_query = response_queries(rollout.response_mask)
    column = torch.arange(is_query.shape[1], device=is_query.device)
    is_last = is_query & (column == (column * is_query).amax(dim=1)[:, None])
    n_born = rollout.attention_mask.long().cumsum(dim=1)
    of_queries: list[Tensor] = []
    of_last: list[Tensor] = []
    for layer in range(rollout.record.evicted_at.shape[1]):
        fraction = cached_keys(rollout, layer) / n_born[:, None].clamp(min=1)
        for sums, is_counted in ((of_queries, is_query), (of_last, is_last)):
            sums.append(fraction.masked_fill(~is_counted[:, None], 0.0).sum(dim=(0, 2)))

    def mean(sums: list[Tensor], is_counted: Tensor) -> Tensor:
        return ranks.all_reduce_sum(torch.stack(sums)) / ranks.all_reduce_sum(is_counted.sum()).clamp(min=1)

    return mean(of_queries, is_query), mean(of_last, is_last)


def misses_keys(rollout: Rollout) -> Bool[Tensor, "batch seq"]:
    """True on queries of response tokens that missed a key in some layer and KV head.

    Only these tokens can differ from those of a policy with all keys.
    """
    first = torch.stack(
        [
            layer.masked_fill(~rollout.attention_mask[:, None], NEVER).flatten(1).amin(dim=1)
            for layer in map(rollout.evictions, range(rollout.record.evicted_at.shape[1]))
        ]
    ).amin(dim=0)
    column = torch.arange(rollout.input_ids.shape[1], device=first.device)
    return response_queries(rollout.response_mask) & (column >= first[:, None])


def affected_shares(
    rollout: Rollout, all_reduce_sum: Callable[[Tensor], Tensor] = SINGLE_PROCESS.all_reduce_sum
) -> dict[str, float]:
    """Return the shares of response tokens, and of responses, whose queries missed keys, over all ranks."""
    misses = misses_keys(rollout)
    counts = [of.sum() for mask in (misses, rollout.response_mask) for of in (mask, mask.any(dim=1))]
    tokens, rows, n_tokens, n_rows = all_reduce_sum(torch.stack(counts)).tolist()
    return {"kv/affected": tokens / max(n_tokens, 1), "kv/affected_rows": rows / max(n_rows, 1)}


def cached_keys(rollout: Rollout, layer: int) -> Int[Tensor, "batch kv_head seq"]:
    """Return the cached keys of one layer at each column: keys written minus keys evicted so far."""
    evicted_at, seq = rollout.evictions(layer), rollout.input_ids.shape[1]
    is_key = rollout.attention_mask[:, None].expand_as(evicted_at).long()
    evictions = torch.zeros(*evicted_at.shape[:-1], seq + 1, dtype=torch.long, device=evicted_at.device)
    evictions.scatter_add_(-1, evicted_at.clamp(max=seq).long(), is_key)
    return rollout.attention_mask.long().cumsum(dim=1)[:, None] - evictions[..., :seq].cumsum(dim=-1)


def response_queries(response_mask: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    """True on the queries that predicted a response token, one column before it."""
    return F.pad(response_mask[:, 1:], (0, 1), value=False)


MAX_LOGITS = 2**24
"""Most logits held at once: 64 MiB in float32, about four times as much with intermediate results."""


def evicted_mass(
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head seq dim"],
    evicted_at: Int[Tensor, "batch kv_head seq"],
    attention_mask: Bool[Tensor, "batch seq"],
    scaling: float,
    softcap: float | None,
    first: int = 0,
    max_logits: int = MAX_LOGITS,
) -> tuple[
    Float[Tensor, "batch head query"], Float[Tensor, "batch head query"], Bool[Tensor, "batch head query"]
]:
    """Return the attention on evicted keys, the largest probability among them, and True where it is the
    largest of all keys.

    A key is evicted for query q if evicted_at[k] <= q. Queries before the first token of their row get NaN.

    Args:
        softcap: logits become softcap·tanh(logits / softcap) before the softmax.
        first: column of the first query.
        max_logits: most logits held at once; queries are processed in chunks.
    """
    batch, n_kv_heads, seq, _ = key.shape
    grouped = query.reshape(batch, n_kv_heads, -1, *query.shape[2:])
    column = torch.arange(seq, device=key.device)
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = key.to(wide).mT[:, :, None]
    parts = []
    for chunk in torch.split(column[first:], max(max_logits // (batch * query.shape[1] * seq), 1)):
        logits = grouped[:, :, :, chunk].to(wide) @ keys * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        is_seen = attention_mask[:, None] & (column <= chunk[:, None])
        probs = logits.masked_fill(~is_seen[:, None, None], -torch.inf).softmax(dim=-1)
        is_dead = evicted_at[:, :, None, None] <= chunk[:, None]
        of_dead = probs.masked_fill(~is_dead, 0.0)
        peak = of_dead.amax(dim=-1)
        is_top = (peak > 0) & (peak == probs.amax(dim=-1))
        parts.append([found.flatten(1, 2) for found in (of_dead.sum(dim=-1), peak, is_top)])
    mass, peak, is_top = (torch.cat(found, dim=2) for found in zip(*parts, strict=True))
    return mass, peak, is_top


class EvictedAttention:
    """Probe for a dense forward over all columns but the last: statistics of `evicted_mass` by layer.

    Only queries that predicted a response token count. The statistics are small tables:

    - `kept` [head]: attention on cached keys, mean over queries;
    - `needs_dead` [head]: share of queries that give one evicted key at least `needed`;
    - `dead_on_top` [head]: share of queries that give an evicted key more than any cached key;
    - `on_dead` [bin]: attention on evicted keys by position in the response, over sequences and heads.

    Args:
        needed: attention on one evicted key from which a query counts as needing it.
    """

    def __init__(self, rollout: Rollout, needed: float, max_logits: int = MAX_LOGITS) -> None:
        self.rollout = rollout
        self.needed = needed
        self.max_logits = max_logits
        is_query = response_queries(rollout.response_mask)
        self.first = int(is_query.any(dim=0).int().argmax())
        self.is_query = is_query[:, self.first : -1]
        self.layers: dict[int, dict[str, Tensor]] = {}
        self._kept: list[Float[Tensor, " query"]] = []

    def __call__(self, inputs: AttentionInputs) -> None:
        """Record the attention of one layer."""
        assert inputs.query is not None
        query, key = to_autocast_dtype(inputs.query, inputs.key)
        with torch.autocast(query.device.type, enabled=False):
            mass, peak, is_top = evicted_mass(
                query,
                key,
                self.rollout.evictions(inputs.layer)[..., :-1],
                self.rollout.attention_mask[:, :-1],
                inputs.scaling,
                inputs.softcap,
                self.first,
                self.max_logits,
            )
        kept = 1 - self._of_queries(mass)
        self._kept.append(kept.mean(dim=0))
        self.layers[inputs.layer] = {
            "kept": kept.mean(dim=1),
            "needs_dead": (self._of_queries(peak) >= self.needed).float().mean(dim=1),
            "dead_on_top": self._of_queries(is_top).float().mean(dim=1),
            "on_dead": self._by_position(mass),
        }

    @property
    def kept_p05(self) -> Float[Tensor, ""]:
        """5th percentile over queries of the attention on cached keys, mean over layers and heads."""
        return fifth_percentile(torch.stack(self._kept).mean(dim=0))

    def stacked(self, name: str) -> Float[Tensor, "layer entry"]:
        """Return one of the statistics for all layers in order."""
        return torch.stack([self.layers[layer][name] for layer in sorted(self.layers)])

    def _of_queries(self, values: Shaped[Tensor, "batch head query"]) -> Shaped[Tensor, "head entry"]:
        return values.transpose(0, 1)[:, self.is_query]

    def _by_position(self, mass: Float[Tensor, "batch head query"]) -> Float[Tensor, " bin"]:
        response_mask = self.rollout.response_mask
        of_tokens = mass.new_zeros(response_mask.shape)
        of_tokens[:, self.first + 1 :] = mass.mean(dim=1)
        return by_position(of_tokens, response_mask).nanmean(dim=1)


def fifth_percentile(values: Float[Tensor, "*lead entry"]) -> Float[Tensor, "*lead"]:
    """Return the smallest value that at least 5 % of the entries do not exceed."""
    return values.kthvalue(math.ceil(0.05 * values.shape[-1]), dim=-1).values
