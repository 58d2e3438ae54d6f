"""Size of each value after the output projection, by which CriticalKV weighs attention (arXiv:2502.03805)."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

MOST_NUMBERS = 2**24
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
    of_heads = weight.to(values.dtype).view(n_heads, -1, dim, weight.shape[1])
    block = max(1, MOST_NUMBERS // (batch * weight.shape[1]))
    dtype = torch.promote_types(values.dtype, torch.float32)
    norms = torch.zeros(batch, n_heads, n_slots, dtype=dtype, device=values.device)
    for head, group in enumerate(of_heads):
        for start in range(0, n_slots, block):
            some = slice(start, start + block)
            for projection in group:
                norms[:, head, some] += (values[:, head, some] @ projection).abs().sum(-1, dtype=dtype)
    return norms / of_heads.shape[1]
