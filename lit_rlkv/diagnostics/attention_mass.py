"""Attention of the dense policy on keys that the rollout had already evicted."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from lit_rlkv.diagnostics.eviction_counts import response_queries
from lit_rlkv.diagnostics.position_bins import by_position
from lit_rlkv.kernels.backend import to_autocast_dtype
from lit_rlkv.types import Rollout

MAX_LOGITS = 2**24
"""Most logits held at once: 64 MiB in float32, some four times that with what is made of them."""


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
    """Return the mass of softmax(q·kᵀ·scaling) on evicted keys, the largest probability among them, and
    whether it is the largest of all keys. A key is evicted for query q if evicted_at[k] <= q; queries start
    at column `first`.

    Queries that stand before the first token of their row see nothing, and get NaN.

    Args:
        softcap: logits become softcap·tanh(logits / softcap) first.
        max_logits: held at once; queries come in chunks.
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


@dataclass(frozen=True)
class LayerAttention:
    """Dense attention of one layer on evicted keys."""

    kept: Float[Tensor, " head"]
    """Mass on cached keys: mean over queries."""
    kept_p05: Float[Tensor, " head"]
    """Mass on cached keys: 5th percentile over queries."""
    needs_dead: Float[Tensor, " head"]
    """Share of queries that give a single evicted key at least `needed`."""
    dead_on_top: Float[Tensor, " head"]
    """Share of queries that give a evicted key more than any cached one."""
    on_dead: Float[Tensor, " bin"]
    """Mass on evicted keys by position in the response: mean over sequences and heads."""


class EvictedAttention:
    """The `probe` of a dense forward over all columns but the last: statistics of `evicted_mass`, by layer.

    Only queries that predicted a response token count. Small tables per layer are kept, never one entry for
    each pair of tokens.

    Args:
        needed: probability from which on a query is said to need a single evicted key.
    """

    def __init__(self, rollout: Rollout, needed: float, max_logits: int = MAX_LOGITS) -> None:
        self.rollout = rollout
        self.needed = needed
        self.max_logits = max_logits
        is_query = response_queries(rollout.response_mask)
        self.first = int(is_query.any(dim=0).int().argmax())
        self.is_query = is_query[:, self.first : -1]
        self.layers: dict[int, LayerAttention] = {}
        self._kept: list[Float[Tensor, " query"]] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, scaling: float, softcap: float | None) -> None:
        """Record the attention of one layer."""
        query, key = to_autocast_dtype(query, key)
        with torch.autocast(query.device.type, enabled=False):
            mass, peak, is_top = evicted_mass(
                query,
                key,
                self.rollout.evicted_at[:, layer, :, :-1],
                self.rollout.attention_mask[:, :-1],
                scaling,
                softcap,
                self.first,
                self.max_logits,
            )
        kept = 1 - self._of_queries(mass)
        self._kept.append(kept.mean(dim=0))
        self.layers[layer] = LayerAttention(
            kept=kept.mean(dim=1),
            kept_p05=fifth_percentile(kept),
            needs_dead=(self._of_queries(peak) >= self.needed).float().mean(dim=1),
            dead_on_top=self._of_queries(is_top).float().mean(dim=1),
            on_dead=self._by_position(mass),
        )

    @property
    def kept_p05(self) -> Float[Tensor, ""]:
        """5th percentile over queries of the mass on cached keys, mean over layers and heads."""
        return fifth_percentile(torch.stack(self._kept).mean(dim=0))

    def stacked(self, name: str) -> Float[Tensor, "layer entry"]:
        """A field of `LayerAttention`, all layers in order."""
        return torch.stack([getattr(self.layers[layer], name) for layer in sorted(self.layers)])

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
