"""Definition of shadow attention: dense attention under the mask that the eviction table implies."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.kernels.backend import in_autocast_dtype
from lit_rlkv.kernels.shadow_attention.plan import SlotPlan


def visible(evicted_at: Int[Tensor, "*lead seq"]) -> Bool[Tensor, "*lead seq seq"]:
    """Return a mask [..., q, k], True where query q of the rollout could still see key k."""
    column = torch.arange(evicted_at.shape[-1], device=evicted_at.device)
    is_causal = column[:, None] >= column[None, :]
    is_cached = column[:, None] < evicted_at[..., None, :]
    return is_causal & is_cached


def shadow_attention(
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head seq dim"],
    value: Float[Tensor, "batch kv_head seq dim_v"],
    evicted_at: Int[Tensor, "batch #kv_head seq"],  # noqa: F821 (ruff reads the shape as code)
    scaling: float,
    *,
    softcap: float | None = None,
    plan: SlotPlan | None = None,
    sink: Float[Tensor, "*head"] | None = None,
) -> Float[Tensor, "batch head seq dim_v"]:
    """Return softmax(q·kᵀ·scaling) v over keys k <= q < evicted_at[k], and 0 where there is none (padding).

    Args:
        softcap: logits become softcap · tanh(logits / softcap) before the softmax.
        plan: made from this layer's `evicted_at`. With it the Triton kernels do work in proportion to the
            cached keys, without it that of dense causal attention; results are the same up to rounding. The
            definition ignores it.
        sink: a logit of each query head in the softmax, without a value; None: none.
    """
    if sink is None:
        return masked_attention(query, key, value, visible(evicted_at), scaling, softcap)
    found = masked_attention_with_lse(query, key, value, visible(evicted_at), scaling, softcap)
    return beside_sink(*found, sink)


def beside_sink(
    out: Float[Tensor, "batch head query dim_v"],
    lse: Float[Tensor, "batch head query"],
    sink: Float[Tensor, "*head"],
) -> Float[Tensor, "batch head query dim_v"]:
    """Return an attention's output with a sink s in its softmax: out · exp(lse) / (exp(lse) + exp(s))."""
    share = (lse - sink.flatten()[:, None]).sigmoid()
    return out * share[..., None].to(out.dtype)


def masked_attention(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key dim_v"],
    is_visible: Bool[Tensor, "batch #kv_head query key"],  # noqa: F821
    scaling: float,
    softcap: float | None,
) -> Float[Tensor, "batch head query dim_v"]:
    """Return the attention of any queries to any keys under a mask."""
    if softcap is not None:
        return masked_attention_with_lse(query, key, value, is_visible, scaling, softcap)[0]
    group = query.shape[1] // key.shape[1]
    if is_visible.shape[1] > 1:
        is_visible = is_visible.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=is_visible, scale=scaling, enable_gqa=group > 1
    )


@in_autocast_dtype
def shadow_attention_with_lse(
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head seq dim"],
    value: Float[Tensor, "batch kv_head seq dim_v"],
    evicted_at: Int[Tensor, "batch #kv_head seq"],  # noqa: F821 (ruff reads the shape as code)
    scaling: float,
    *,
    softcap: float | None = None,
    plan: SlotPlan | None = None,
) -> tuple[Float[Tensor, "batch head seq dim_v"], Float[Tensor, "batch head seq"]]:
    """Return `shadow_attention`, and log Σ exp(logit) over the visible keys: -inf for a query that sees none.

    The log-sum-exp is at least float32. Gradients flow through both.
    """
    return masked_attention_with_lse(query, key, value, visible(evicted_at), scaling, softcap)


def masked_attention_with_lse(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key dim_v"],
    is_visible: Bool[Tensor, "batch #kv_head query key"],  # noqa: F821
    scaling: float,
    softcap: float | None,
) -> tuple[Float[Tensor, "batch head query dim_v"], Float[Tensor, "batch head query"]]:
    """Return `masked_attention`, and the log-sum-exp of the logits that each query sees."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(len(query), key.shape[1], -1, *query.shape[2:])  # [batch kv_head group seq dim]
    logits = grouped.to(wide) @ key.to(wide)[:, :, None].mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~is_visible[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    probs = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    out = probs.to(value.dtype) @ value[:, :, None]
    return out.flatten(1, 2), lse.flatten(1, 2)
