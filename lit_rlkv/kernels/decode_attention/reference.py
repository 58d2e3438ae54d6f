"""Definition of decode attention: one new token per sequence over the slot pool."""

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
    sink: Float[Tensor, "kv_head group"] | None = None,
    received: Float32[Tensor, "batch kv_head slot"] | None = None,
    accumulates: bool = False,
    n_splits: int | None = None,
) -> Float[Tensor, "batch kv_head group dim_v"]:
    """Return softmax(q·kᵀ·scaling) v over the first `n_live` slots of each row; 0 for a row without any.

    The other slots must hold finite numbers. Never waits for the device, so a call can be captured in a CUDA
    graph.

    Args:
        softcap: logits become softcap · tanh(logits / softcap) before the softmax.
        sink: a logit of each query head that takes its share of the softmax and has no value.
        received: written in place: the probability that each slot received, as the mean over the query heads
            of its group; 0 in unused slots.
        accumulates: add to `received` instead of overwriting it; the newest key, in slot n_live - 1, starts
            from 0.
        n_splits: programs of the kernel that share the slots of a row and KV head, 1 to `launch.MAX_SPLITS`.
            Rounding depends on it. None: more of them for fewer rows. The definition does not split.
    """
    slot = torch.arange(keys.shape[2], device=keys.device)
    is_unused = (slot >= n_live[:, None])[:, None]
    logits = (query @ keys.transpose(-1, -2)).float() * scaling
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(is_unused[:, :, None], -torch.inf)
    if sink is None:
        probs = logits.softmax(-1)
    else:
        own = sink.float()[None, :, :, None].expand(len(logits), -1, -1, 1)
        probs = torch.cat([logits, own], dim=-1).softmax(-1)[..., :-1]
    # Already 0, except in a row without any key, whose softmax is NaN.
    probs = probs.masked_fill(is_unused[:, :, None], 0.0)
    if received is not None:
        share = probs.mean(dim=2)
        if accumulates:
            is_newest = (slot == n_live[:, None] - 1)[:, None]
            received.masked_fill_(is_newest, 0.0).add_(share)
        else:
            received.copy_(share)
    return probs.to(values.dtype) @ values
