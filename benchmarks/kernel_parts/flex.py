"""The eviction table as a mask of FlexAttention, to compare with: exact; it skips blocks only as a whole."""

from typing import no_type_check

from jaxtyping import Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


def block_mask(evicted_at: Int[Tensor, "batch evicted_at_head seq"], group: int) -> BlockMask:
    """Return the blocks that FlexAttention may skip, where `group` query heads share a KV head."""
    batch, n_tables, seq = evicted_at.shape

    @no_type_check  # torch counts its arguments
    def is_visible(b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        table = head // group if n_tables > 1 else 0
        return (k <= q) & (q < evicted_at[b, table, k])

    n_heads = n_tables * group if n_tables > 1 else None
    return create_block_mask(is_visible, batch, n_heads, seq, seq, device=evicted_at.device)
