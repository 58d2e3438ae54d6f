"""Definition of decode attention: one new token per sequence over the slot pool."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32, Int, Shaped
from torch import Tensor

from lit_rlkv.kernels.quantization import dequantize


def decode_attention(
    query: Float[Tensor, "batch kv_head group dim"],
    keys: Shaped[Tensor, "batch kv_head slot _"],
    values: Shaped[Tensor, "batch kv_head slot _"],
    n_live: Int[Tensor, " batch"],
    scaling: float,
    *,
    softcap: float | None = None,
    sink: Float[Tensor, "kv_head group"] | None = None,
    received: Float32[Tensor, "batch kv_head slot"] | None = None,
    accumulates: bool = False,
    n_splits: int | None = None,
    kv_dtype: str | None = None,
    scales: Sequence[Tensor] = (),
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
            Float error depends on it. None: more of them for fewer rows. The definition does not split.
        kv_dtype: `keys` and `values` are the codes of `kernels.quantization`; None: numbers.
        scales: of the codes of keys and of values, [batch, kv_head, slot, scale].
    """
    if kv_dtype is not None:
        keys, values = (
            dequantize(*pool, kv_dtype, query.dtype) for pool in zip((keys, values), scales, strict=True)
        )
    slot = torch.arange(keys.shape[2], device=keys.device)
    is_unused = (slot >= n_live[:, None])[:, None]
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = (query @ keys.transpose(-1, -2)).to(wide) * scaling
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(is_unused[:, :, None], -torch.inf)
    if sink is None:
        probs = logits.softmax(-1)
    else:
        own = sink.to(wide)[None, :, :, None].expand(len(logits), -1, -1, 1)
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
