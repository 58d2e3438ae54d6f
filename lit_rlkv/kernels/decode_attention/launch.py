"""Launch sizes of decode attention, from shapes, dtype and device alone: no timing changes a result."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.kernels.device import describe

BLOCK_BYTES = 16_384
"""Bytes of keys, and of values, that a program takes at once."""
MAX_BLOCK = 128
"""Slots of it: with more, for which heads of few dimensions leave room, registers overflow."""
MAX_LOGITS = 1024
"""Logits of a block per warp; with more, which many query heads make, registers overflow too."""
MAX_QUERY_BYTES = 65_536
"""Bytes of the query heads of a group, all of which a program holds; more leave no room for keys."""
MIN_SPLIT_SLOTS = 256
"""Below it a program's start weighs more than its share of the bytes."""
MAX_SPLITS = 128
"""Splits that the merging kernel holds in one tile."""


@dataclass(frozen=True)
class Launch:
    """Launch sizes of the kernel that attends."""

    n_splits: int
    """Programs that share the slots of one row and KV head."""
    block: int
    """Slots that a program takes at once."""
    n_stages: int
    """With 4, three blocks of keys and of values are on their way to a program while it computes."""
    n_warps: int


def fits(
    query: Float[Tensor, "batch kv_head group dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    values: Float[Tensor, "batch kv_head slot dim_v"],
    *args: object,
    **kwargs: object,
) -> bool:
    """Return True if one program can hold the query heads of a group on an L40S, A100 or H100.

    Takes the arguments of `decode_attention`. In 16 bit 128 heads of 256 dimensions fit.
    """
    return _query_bytes(query, values) <= MAX_QUERY_BYTES


def _query_bytes(query: Tensor, values: Tensor) -> int:
    return padded(query.shape[2]) * _row_bytes(query, values)


def _row_bytes(query: Tensor, values: Tensor) -> int:
    return padded(max(query.shape[3], values.shape[3])) * query.element_size()


def plan(
    query: Float[Tensor, "batch kv_head group dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    values: Float[Tensor, "batch kv_head slot dim_v"],
    n_splits: int | None = None,
) -> Launch:
    """Return the launch sizes of a call; `n_splits` overrides the choice."""
    n_pairs, group, n_slots = query.shape[0] * query.shape[1], query.shape[2], keys.shape[2]
    device = describe(query.device)
    if n_splits is None:
        n_splits = choose_n_splits(n_pairs, n_slots, device.n_multiprocessors)
    is_wide, is_small = padded(group) >= 64, device.shared_bytes <= 110_000
    is_crowded = is_wide and is_small  # many queries beside the blocks of keys and values
    # Products in float32 are not made for tensor cores; with 4 warps their operands overflow registers, as
    # those of very many queries do.
    n_warps = 8 if query.dtype == torch.float32 or padded(group) > 64 else 4
    n_stages = 2 if is_crowded else 3 if is_wide or is_small else 4
    if is_small and _query_bytes(query, values) >= MAX_QUERY_BYTES:
        n_stages = 1  # what is left holds one block
    most = BLOCK_BYTES // (2 if is_crowded else 1) // _row_bytes(query, values)
    return Launch(
        n_splits=n_splits,
        block=max(16, min(most, MAX_BLOCK, MAX_LOGITS * n_warps // padded(group))),
        n_stages=n_stages,
        n_warps=n_warps,
    )


def choose_n_splits(n_pairs: int, n_slots: int, n_multiprocessors: int) -> int:
    """One from three programs a multiprocessor on: two run at a time, and the last third still fills it.

    Always a power of two, because kernels are compiled for it: another batch or pool seldom needs a new one.
    """
    if n_pairs >= 3 * n_multiprocessors:
        return 1
    wanted = -(-4 * n_multiprocessors // n_pairs)
    most = max(1, min(wanted, n_slots // MIN_SPLIT_SLOTS, MAX_SPLITS))
    return 1 << (most.bit_length() - 1)


def padded(size: int) -> int:
    """Return the power of two, at least 16, that tiles and matrix instructions take."""
    return max(16, power_of_2(size))


def shared_block(n_logits: int, group: int, n_slots: int) -> int:
    """Slots whose logits a program weighs at once: many loads on their way hide how long each takes."""
    return max(16, min(n_logits // power_of_2(group), power_of_2(n_slots)))


def power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
