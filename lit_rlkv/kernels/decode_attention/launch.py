"""Launch sizes of decode attention, from shapes, dtype and device alone: no timing changes a result."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_rlkv.kernels.device import device_info

BLOCK_BYTES = 16_384
"""Bytes of keys, and of values, per step of a program."""
MAX_BLOCK = 128
"""Most slots per step; with more, which fit for heads of few dimensions, registers spill."""
MAX_LOGITS = 1024
"""Most logits of a block per warp; with more, as with many query heads, registers spill."""
MAX_QUERY_BYTES = 65_536
"""Most bytes of a group's query heads, which a program holds; more leave no room for keys."""
MIN_SPLIT_SLOTS = 256
"""Fewest slots per split; below, the start of a program costs more than its share of the bytes."""
MAX_SPLITS = 128
"""Most splits, which the merging kernel holds in one tile."""


@dataclass(frozen=True)
class Launch:
    """Launch sizes of the attention kernel."""

    n_splits: int
    """Programs that share the slots of one row and KV head."""
    block: int
    """Slots per step of a program."""
    n_stages: int
    """Pipeline stages; with 4, three blocks of keys and values are in flight during a computation."""
    n_warps: int


def fits(
    query: Tensor, keys: Tensor, values: Tensor, *args: object, kv_dtype: str | None = None, **kwargs: object
) -> bool:
    """Return True if one program can hold the query heads of a group on an L40S, A100 or H100.

    Takes the arguments of `decode_attention`. In 16 bit 128 heads of 256 dimensions fit.
    """
    return _query_bytes(query, value_dim(values, kv_dtype)) <= MAX_QUERY_BYTES


def value_dim(values: Tensor, kv_dtype: str | None) -> int:
    """Return the numbers of a value, of which int4 has two in a byte."""
    return values.shape[3] * (2 if kv_dtype == "int4" else 1)


def _query_bytes(query: Tensor, dim_v: int) -> int:
    return padded(query.shape[2]) * _row_bytes(query, dim_v)


def _row_bytes(query: Tensor, dim_v: int) -> int:
    return padded(max(query.shape[3], dim_v)) * query.element_size()


def plan(
    query: Tensor, keys: Tensor, values: Tensor, n_splits: int | None = None, kv_dtype: str | None = None
) -> Launch:
    """Return the launch sizes of a call of `decode_attention`; `n_splits` overrides the choice."""
    n_pairs, group, n_slots = query.shape[0] * query.shape[1], query.shape[2], keys.shape[2]
    dim_v = value_dim(values, kv_dtype)
    device = device_info(query.device)
    if n_splits is None:
        n_splits = choose_n_splits(n_pairs, n_slots, device.n_multiprocessors)
    is_wide, is_small = padded(group) >= 64, device.shared_bytes <= 110_000
    is_crowded = is_wide and is_small  # many queries beside the blocks of keys and values
    # float32 products do not use tensor cores; with 4 warps their operands, or very many queries, spill.
    n_warps = 8 if query.dtype == torch.float32 or padded(group) > 64 else 4
    n_stages = 2 if is_crowded else 3 if is_wide or is_small else 4
    if is_small and _query_bytes(query, dim_v) >= MAX_QUERY_BYTES:
        n_stages = 1  # the rest of shared memory holds one block
    most = BLOCK_BYTES // (2 if is_crowded else 1) // _row_bytes(query, dim_v)
    return Launch(
        n_splits=n_splits,
        block=max(16, min(most, MAX_BLOCK, MAX_LOGITS * n_warps // padded(group))),
        n_stages=n_stages,
        n_warps=n_warps,
    )


def choose_n_splits(n_pairs: int, n_slots: int, n_multiprocessors: int) -> int:
    """Return the splits of each pair; 1 with at least three programs per multiprocessor.

    Always a power of two, because a kernel is compiled for each number of splits.
    """
    if n_pairs >= 3 * n_multiprocessors:
        return 1
    wanted = -(-4 * n_multiprocessors // n_pairs)
    most = max(1, min(wanted, n_slots // MIN_SPLIT_SLOTS, MAX_SPLITS))
    return 1 << (most.bit_length() - 1)


def padded(size: int) -> int:
    """Return the next power of two, at least 16, as tiles and matrix instructions require."""
    return max(16, next_power_of_2(size))


def shared_block(n_logits: int, group: int, n_slots: int) -> int:
    """Return the slots per step of normalizing logits; many loads in flight hide their latency."""
    return max(16, min(n_logits // next_power_of_2(group), next_power_of_2(n_slots)))


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
