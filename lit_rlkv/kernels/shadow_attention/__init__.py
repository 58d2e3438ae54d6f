"""Shadow attention: what the learner computes so that it sees what the sampler saw."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_rlkv.kernels.backend import as_autocast, uses_triton
from lit_rlkv.kernels.shadow_attention import reference
from lit_rlkv.kernels.shadow_attention.plan import SlotPlan, plan_slots
from lit_rlkv.kernels.shadow_attention.tiles import MAX_HEAD_DIM

__all__ = ["SlotPlan", "plan_slots", "shadow_attention", "shadow_attention_with_lse"]


def shadow_attention(
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head seq dim"],
    value: Float[Tensor, "batch kv_head seq dim_v"],
    evicted_at: Int[Tensor, "batch #kv_head seq"],  # noqa: F821 (ruff reads the shape as code)
    scaling: float,
    *,
    softcap: float | None = None,
    plan: SlotPlan | None = None,
    kernels: str | None = None,
) -> Float[Tensor, "batch head seq dim_v"]:
    """softmax(q·kᵀ·scaling) v over keys with k <= q < evicted_at[k]; 0 for a query that sees nothing (padding).

    Args:
        softcap: logits become softcap·tanh(logits / softcap) before the softmax.
        plan: of this layer's `evicted_at`; with it the Triton kernels do work in proportion to the living keys,
            without it that of dense causal attention. Results are the same up to rounding.
        kernels: auto, reference or triton; what the process has chosen unless told. Auto is the definition
            also for heads of more dimensions than the kernels hold, and triton refuses these.
    """
    if softcap is None and not _uses_triton(query, value, kernels):
        return reference.shadow_attention(query, key, value, evicted_at, scaling)
    return shadow_attention_with_lse(
        query, key, value, evicted_at, scaling, softcap=softcap, plan=plan, kernels=kernels
    )[0]


def shadow_attention_with_lse(
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head seq dim"],
    value: Float[Tensor, "batch kv_head seq dim_v"],
    evicted_at: Int[Tensor, "batch #kv_head seq"],  # noqa: F821 (ruff reads the shape as code)
    scaling: float,
    *,
    softcap: float | None = None,
    plan: SlotPlan | None = None,
    kernels: str | None = None,
) -> tuple[Float[Tensor, "batch head seq dim_v"], Float[Tensor, "batch head seq"]]:
    """`shadow_attention`, and log Σ exp(logit) over the visible keys: -inf for a query that sees nothing.

    The latter is at least float32. Gradients flow through both.
    """
    device = query.device.type
    query, key, value = as_autocast(query, key, value)
    with torch.autocast(device, enabled=False):
        if not _uses_triton(query, value, kernels):
            return reference.shadow_attention_with_lse(
                query, key, value, evicted_at, scaling, softcap=softcap
            )
        from lit_rlkv.kernels.shadow_attention import ops  # Triton exists on Linux only

        return ops.shadow_attention_with_lse(
            query, key, value, evicted_at, scaling, softcap=softcap, plan=plan
        )


def _uses_triton(query: Tensor, value: Tensor, kernels: str | None) -> bool:
    return uses_triton(query, kernels, fits=max(query.shape[-1], value.shape[-1]) <= MAX_HEAD_DIM)
