"""Attention of given tokens over the keys of their rows, and the attention that each key receives."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

MAX_LOGITS = 2**26
"""Most logits held at once: 256 MiB in float32."""

Seen = Callable[[Int[Tensor, " query"]], Bool[Tensor, "batch query candidate"]]
"""Returns, for the given tokens of these numbers, True where they see a candidate."""


def feed_attention(
    query: Float[Tensor, "batch head new dim"],
    key: Float[Tensor, "batch kv_head candidate dim"],
    value: Float[Tensor, "batch kv_head candidate dim_v"],
    is_seen: Seen,
    scaling: float,
    softcap: float | None,
    sink: Float[Tensor, "kv_head group"] | None,
) -> Float[Tensor, "batch head new dim_v"]:
    """Return softmax(q·kᵀ·scaling) v over the keys that each query sees; 0 for one that sees none.

    Args:
        softcap, sink: see `decode_attention`.
    """
    packed = query.reshape(len(key), key.shape[1], -1, *query.shape[2:])
    if softcap is None and sink is None:
        # The query heads of a group as further queries: without `enable_gqa` every backend takes a mask.
        is_visible = is_seen(torch.arange(query.shape[2], device=query.device))
        is_visible = is_visible.repeat(1, packed.shape[2], 1)[:, None]
        out = F.scaled_dot_product_attention(
            packed.flatten(2, 3), key, value, attn_mask=is_visible, scale=scaling
        )
        return out.view(*query.shape[:3], -1)
    parts = [
        probs.to(value.dtype) @ value[:, :, None]
        for _, probs in _probabilities(packed, key, is_seen, scaling, softcap, sink)
    ]
    return torch.cat(parts, dim=3).flatten(1, 2)


def received_attention(
    query: Float[Tensor, "batch kv_head group new dim"],
    key: Float[Tensor, "batch kv_head candidate dim"],
    is_seen: Seen,
    is_token: Bool[Tensor, "batch new"],
    scaling: float,
    softcap: float | None,
    sink: Float[Tensor, "kv_head group"] | None = None,
    *,
    last_only: bool,
) -> Float[Tensor, "batch kv_head candidate"]:
    """Return the attention that each key received, mean over the query group: the scores of h2o and tova.

    With `last_only` it is the attention of the last query, otherwise the sum over all queries.

    Args:
        is_token: False for queries of padding, which do not count.
    """
    received = torch.zeros(key.shape[:3], device=key.device, dtype=torch.float32)
    first = query.shape[3] - 1 if last_only else 0
    for block, probs in _probabilities(query, key, is_seen, scaling, softcap, sink, first):
        is_query = is_token[:, None, None, block][..., None]
        received += probs.masked_fill(~is_query, 0.0).sum(dim=3).mean(dim=2)
    return received


def _probabilities(
    query: Float[Tensor, "batch kv_head group new dim"],
    key: Float[Tensor, "batch kv_head candidate dim"],
    is_seen: Seen,
    scaling: float,
    softcap: float | None,
    sink: Float[Tensor, "kv_head group"] | None,
    first: int = 0,
) -> Iterator[tuple[Int[Tensor, " block"], Float[Tensor, "batch kv_head group block candidate"]]]:
    """Yield blocks of queries, from number `first` on, and their probabilities; 0 for one without keys."""
    n_keys, wide = key.shape[2], torch.promote_types(query.dtype, torch.float32)
    place = torch.arange(first, query.shape[3], device=key.device)
    n_queries = max(MAX_LOGITS // (query[:, :, :, 0, 0].numel() * n_keys), 1)
    for block in torch.split(place, n_queries):
        logits = query[:, :, :, block].to(wide) @ key.to(wide).transpose(-1, -2).unsqueeze(2) * scaling
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        is_visible = is_seen(block)[:, None, None]
        logits = logits.masked_fill(~is_visible, -torch.inf)
        if sink is not None:  # it takes a share, and receives nothing
            own = sink.to(wide)[None, :, :, None, None].expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, own], dim=-1)
        sees_none = ~is_visible.any(-1, keepdim=True)
        yield block, logits.softmax(-1)[..., :n_keys].masked_fill(sees_none, 0.0)
