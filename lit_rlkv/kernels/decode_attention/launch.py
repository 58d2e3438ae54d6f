"""How a decode-attention call is cut: by shapes, dtype and device alone, so that no timing moves a result."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK_BYTES = 16_384
"""Of keys, and of values, that a program takes at once."""
MIN_SPLIT_SLOTS = 256
"""Below it a program's start weighs more than its share of the bytes."""
MAX_SPLITS = 128
"""What the merging kernel holds in one tile."""


@dataclass(frozen=True)
class Launch:
    """Of the kernel that attends."""

    n_splits: int
    """Programs that share the slots of one row and KV head."""
    block: int
    """Slots that a program takes at once."""
    n_stages: int
    """With 4, three blocks of keys and of values are on their way to a program while it computes."""
    n_warps: int


def plan(
    query: Float[Tensor, "batch kv_head group dim"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    values: Float[Tensor, "batch kv_head slot dim_v"],
    n_splits: int | None = None,
) -> Launch:
    """The launch of a call; `n_splits` overrides the choice."""
    n_pairs, group, n_slots = query.shape[0] * query.shape[1], query.shape[2], keys.shape[2]
    width = padded(max(query.shape[3], values.shape[3])) * query.element_size()
    device = describe(query.device)
    if n_splits is None:
        n_splits = choose_n_splits(n_pairs, n_slots, device.n_multiprocessors)
    is_wide, is_small = padded(group) >= 64, device.shared_bytes <= 110_000
    is_crowded = is_wide and is_small  # many queries beside the blocks of keys and values
    return Launch(
        n_splits=n_splits,
        block=max(16, BLOCK_BYTES // width // (2 if is_crowded else 1)),
        n_stages=2 if is_crowded else 3 if is_wide or is_small else 4,
        # Products in float32 are not made for tensor cores; with 4 warps their operands overflow registers,
        # as those of very many queries do.
        n_warps=8 if query.dtype == torch.float32 or padded(group) > 64 else 4,
    )


def choose_n_splits(n_pairs: int, n_slots: int, n_multiprocessors: int) -> int:
    """One from three programs a multiprocessor on: two run at a time, and the last third still fills it."""
    if n_pairs >= 3 * n_multiprocessors:
        return 1
    wanted = -(-4 * n_multiprocessors // n_pairs)
    return max(1, min(wanted, n_slots // MIN_SPLIT_SLOTS, MAX_SPLITS))


@dataclass(frozen=True)
class Device:
    """What a launch is cut for; an H100 where there is no GPU, in the interpreter and when only compiling."""

    n_multiprocessors: int = 132
    shared_bytes: int = 233_472
    """Of a multiprocessor."""


def describe(device: torch.device) -> Device:
    """The device's sizes, which torch remembers: no wait for the device."""
    if device.type != "cuda":
        return Device()
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)


def padded(size: int) -> int:
    """The power of two, 16 at least, that tiles and matrix instructions take."""
    return max(16, power_of_2(size))


def shared_block(n_logits: int, group: int, n_slots: int) -> int:
    """Slots whose logits a program weighs at once: many loads on their way hide how long each takes."""
    return max(16, min(n_logits // power_of_2(group), power_of_2(n_slots)))


def power_of_2(size: int) -> int:
    """The first that is not below `size`."""
    return 1 << (size - 1).bit_length()
