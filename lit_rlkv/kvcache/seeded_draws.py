"""Random numbers that are a function of a seed and of a key's place, the same on every device."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

BITS = 32
FACTOR = 0x45D9F3B
"""Odd and below 2^27, so that 32 bits times it stay within int64."""


def seeded_draws(
    seed: int, layer: int, positions: Int[Tensor, "batch kv_head key"], now: Int[Tensor, " batch"]
) -> Float[Tensor, "batch kv_head key"]:
    """Return numbers of 24 bits from [0, 1) by seed, layer, KV head, key and moment.

    Args:
        seed: from 0 to 2^32 − 1.
        layer: number of the layer among those with attention.
        positions: of the keys, from the first token of their row.
        now: position of the first query that does not see what is evicted.
    """
    heads = torch.arange(positions.shape[1], device=positions.device)[:, None]
    bits = torch.zeros((), dtype=torch.long, device=positions.device)
    for part in (seed, layer, heads, now[:, None, None], positions):
        bits = _mixed(bits ^ part)
    return (bits >> (BITS - 24)).float() / 2**24


def _mixed(bits: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Return the low 32 bits, each of which then depends on all: two rounds of xor-shift and multiply."""
    low = (1 << BITS) - 1
    bits = bits & low
    for _ in range(2):
        bits = ((bits ^ (bits >> 16)) * FACTOR) & low
    return bits ^ (bits >> 16)
