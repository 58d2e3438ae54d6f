"""Shadow attention by torch's FlexAttention, to compare with: exact; it skips blocks only as a whole.

On CUDA it needs torch.compile, which whoever calls it does; without it every logit is stored.
"""

from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def block_mask(evicted_at: Int[Tensor, "batch evicted_at_head seq"], group: int) -> BlockMask:
    """Return the blocks that FlexAttention may skip, where `group` query heads share a KV head."""
    batch, n_tables, seq = evicted_at.shape

    @no_type_check  # torch counts its arguments
    def is_visible(b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        table = head // group if n_tables > 1 else 0
        return (k <= q) & (q < evicted_at[b, table, k])

    n_heads = n_tables * group if n_tables > 1 else None
    return create_block_mask(is_visible, batch, n_heads, seq, seq, device=evicted_at.device)


def shadow_attention(
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head seq dim"],
    value: Float[Tensor, "batch kv_head seq dim_v"],
    evicted_at: Int[Tensor, "batch #kv_head seq"],  # noqa: F821 (ruff reads the shape as code)
    scaling: float,
    *,
    softcap: float | None = None,
) -> Float[Tensor, "batch head seq dim_v"]:
    """The operation of the same name; a mask of blocks is made at every call."""
    group = query.shape[1] // key.shape[1]

    @no_type_check
    def capped(logit: Tensor, b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return logit if softcap is None else softcap * torch.tanh(logit / softcap)

    out = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=block_mask(evicted_at, group),
        scale=scaling,
        enable_gqa=group > 1,
    )
    assert isinstance(out, Tensor)
    return out
