"""Attention of one new token per sequence over the slot pool: the definition."""

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor


def decode_attention(
    query: Float[Tensor, "batch kv_head group dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    values: Float[Tensor, "batch kv_head slot dim_v"],
    n_live: Int[Tensor, " batch"],
    scaling: float,
    *,
    softcap: float | None = None,
    received: Float32[Tensor, "batch kv_head slot"] | None = None,
    accumulates: bool = False,
) -> Float[Tensor, "batch kv_head group dim_v"]:
    """Its signature's meaning stands with `lit_rlkv.kernels.decode_attention.decode_attention`."""
    slot = torch.arange(keys.shape[2], device=keys.device)
    is_dead = (slot >= n_live[:, None])[:, None]
    logits = (query @ keys.transpose(-1, -2)).float() * scaling
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    probs = logits.masked_fill(is_dead[:, :, None], -torch.inf).softmax(-1)
    # Zeros already, but in a row without a live slot, which has no softmax.
    probs = probs.masked_fill(is_dead[:, :, None], 0.0)
    if received is not None:
        share = probs.mean(dim=2)
        if accumulates:
            is_newest = (slot == n_live[:, None] - 1)[:, None]
            received.masked_fill_(is_newest, 0.0).add_(share)
        else:
            received.copy_(share)
    return probs.to(values.dtype) @ values
