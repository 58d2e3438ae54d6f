"""Attention of one new token per sequence over the slot pool: the definition."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def decode_attention(
    query: Float[Tensor, "batch kv_head group dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    values: Float[Tensor, "batch kv_head slot dim_v"],
    is_live: Bool[Tensor, "batch slot"],
    scaling: float,
) -> tuple[Float[Tensor, "batch kv_head group dim_v"], Float[Tensor, "batch kv_head group slot"]]:
    """softmax(q·kᵀ·scaling) v over the live slots, and the float32 probabilities that policies read."""
    logits = (query @ keys.transpose(-1, -2)).float() * scaling
    probs = logits.masked_fill(~is_live[:, None, None, :], -torch.inf).softmax(-1)
    return probs.to(values.dtype) @ values, probs
