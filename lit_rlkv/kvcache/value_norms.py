"""Size of each value after the output projection, by which CriticalKV weighs attention (arXiv:2502.03805)."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

MOST_NUMBERS = 2**26
"""Projected numbers that are held at a time."""
EPSILON = 1e-4
"""Added to a score, so that the value counts where no query looks."""

Projection = Callable[[], Float[Tensor, "head_dim hidden"]]
"""Returns W_oᵀ as the sampler has it now, the rows of each query head together."""


def projected_norms(
    values: Float[Tensor, "batch kv_head slot dim_v"], weight: Float[Tensor, "head_dim hidden"]
) -> Float[Tensor, "batch kv_head slot"]:
    """Return ‖W_o v‖₁ of each value, mean over the query heads that share its KV head.

    Args:
        weight: W_oᵀ, the rows of each query head together.
    """
    batch, n_heads, n_slots, dim = values.shape
    by_head = weight.to(values.dtype).view(n_heads, -1, dim, weight.shape[1])
    group = by_head.shape[1]
    wide = by_head.transpose(1, 2).flatten(2)  # the norms of a group add up, so its heads lie side by side
    block = max(1, MOST_NUMBERS // (batch * wide.shape[2]))
    dtype = torch.promote_types(values.dtype, torch.float32)
    norms = [
        torch.linalg.vector_norm(part @ projection, 1, dim=-1, dtype=dtype)
        for of_head, projection in zip(values.unbind(1), wide, strict=True)
        for part in torch.split(of_head, block, dim=1)
    ]
    return torch.cat(norms, dim=1).view(batch, n_heads, n_slots) / group
