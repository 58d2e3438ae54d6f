"""Attention of the learner under the sampler's eviction table: the definition."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F


def visible(evicted_at: Int[Tensor, "*lead seq"]) -> Bool[Tensor, "*lead seq seq"]:
    """[..., q, k] is True where the sampler's query q could still see key k."""
    step = torch.arange(evicted_at.shape[-1], device=evicted_at.device)
    is_causal = step[:, None] >= step[None, :]
    is_alive = step[:, None] < evicted_at[..., None, :]
    return is_causal & is_alive


def shadow_attention(
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head seq dim"],
    value: Float[Tensor, "batch kv_head seq dim_v"],
    evicted_at: Int[Tensor, "batch #kv_head seq"],  # noqa: F821 (ruff reads the shape as code)
    scaling: float,
    *,
    softcap: float | None = None,
) -> Float[Tensor, "batch head seq dim_v"]:
    """softmax(q·kᵀ·scaling) v over keys with k <= q < evicted_at[k]; 0 for a query that sees nothing (padding)."""
    if softcap is not None:
        return shadow_attention_with_lse(query, key, value, evicted_at, scaling, softcap=softcap)[0]
    group = query.shape[1] // key.shape[1]
    is_visible = (
        visible(evicted_at).repeat_interleave(group, dim=1)
        if evicted_at.shape[1] > 1
        else visible(evicted_at)
    )
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=is_visible, scale=scaling, enable_gqa=group > 1
    )


def shadow_attention_with_lse(
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head seq dim"],
    value: Float[Tensor, "batch kv_head seq dim_v"],
    evicted_at: Int[Tensor, "batch #kv_head seq"],  # noqa: F821 (ruff reads the shape as code)
    scaling: float,
    *,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "batch head seq dim_v"], Float[Tensor, "batch head seq"]]:
    """The same written out, with log Σ exp(logit) over visible keys: -inf for a query that sees nothing."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.view(len(query), key.shape[1], -1, *query.shape[2:])  # [batch kv_head group seq dim]
    logits = grouped.to(wide) @ key.to(wide)[:, :, None].mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible(evicted_at)[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    probs = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = probs.to(value.dtype) @ value[:, :, None]
    return out.flatten(1, 2), lse.flatten(1, 2)
