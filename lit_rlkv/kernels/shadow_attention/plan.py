"""SlotPlan: a slot for each cached key, so that the learner's cost is in proportion to the cached keys."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK = 128
"""Queries that share a list of keys. Smaller blocks have shorter lists but start more loops."""

MAX_WORK = 0.75
"""Share of dense causal work above which lists cost more than they save."""

MAX_ENTRIES = 256
"""Most entries of a table per position and KV head, 4 bytes each: 32,768 slots in blocks of 128."""


@dataclass(frozen=True)
class SlotPlan:
    """A slot for every cached key; keys that are cached in the same block of queries never share one.

    Use it only with the eviction table that it was made from: with another one results are wrong.
    """

    block: int
    """Queries in a block: a power of two, at most 128."""
    n_slots: int
    """Slots of every sequence, layer and KV head: the largest number that any of them needs."""
    slot_of: Int[Tensor, "batch *layer kv_head seq"]
    """Slot of each key; meaningless for keys that are never cached."""

    def layer(self, index: int, n_kv_heads: int | None = None) -> "SlotPlan":
        """Return the plan of one layer, as the operation takes it; see `layer_table`."""
        return SlotPlan(self.block, self.n_slots, layer_table(self.slot_of, index, n_kv_heads))


def layer_table(
    table: Int[Tensor, "batch #layer head seq"],  # noqa: F821 (ruff reads the shape as code)
    layer: int,
    n_kv_heads: int | None = None,
) -> Int[Tensor, "batch #kv_head seq"]:  # noqa: F821
    """Return the part of a table for one layer. A table of one layer or KV head serves all.

    Args:
        n_kv_heads: KV heads of the layer, each of which stands several times in the table if other layers
            have more; None: as many as in the table.
    """
    one = table[:, layer if table.shape[1] > 1 else 0]
    n_heads = one.shape[1]
    if n_kv_heads is not None and n_heads > 1 and n_heads % n_kv_heads:
        raise ValueError(f"evicted_at must be of the layer's {n_kv_heads} KV heads or one, got {n_heads}")
    return one if n_kv_heads is None or n_heads == 1 else one[:, :: n_heads // n_kv_heads]


def plan_slots(evicted_at: Int[Tensor, "batch layer kv_head seq"], block: int = BLOCK) -> SlotPlan | None:
    """Return the plan of a whole eviction table. The host waits for the device once.

    None if too few keys are evicted for the lists to save work, or if so many are cached at once that the
    tables would be larger than the sequence.

    Args:
        block: queries that share a list of keys.

    Raises:
        ValueError: `block` is not a power of two from 1 to `BLOCK`.
    """
    if block & (block - 1) or not 0 < block <= BLOCK:
        raise ValueError(
            f"block must be a power of two from 1 to {BLOCK}, got {block}; the default is {BLOCK}"
        )
    slots, needs, works = [], [], []
    for layer in evicted_at.unbind(1):  # one layer at a time, because sorting takes several times its memory
        blocks = CachedBlocks(layer.flatten(0, 1), block)
        slot_of, n_slots = _assign(blocks)
        slots.append(slot_of.view(layer.shape))
        needs.append(n_slots)
        works.append(blocks.work())
    need, work = torch.stack([torch.stack(needs).amax().double(), torch.stack(works).mean()]).tolist()
    if work > MAX_WORK or need > MAX_ENTRIES * block:
        return None
    return SlotPlan(block, max(1, int(need)), torch.stack(slots, dim=1))


class CachedBlocks:
    """The blocks of queries in which each key is cached; rows are the KV heads of all sequences."""

    def __init__(self, evicted_at: Int[Tensor, "row seq"], block: int) -> None:
        self.column = torch.arange(evicted_at.shape[1], device=evicted_at.device)
        self.is_cached = evicted_at > self.column
        self.n_blocks = -(-evicted_at.shape[1] // block)
        self.first = (self.column // block).expand_as(evicted_at)
        last = (evicted_at.clamp(max=evicted_at.shape[1]).long() - 1) // block
        self.last = torch.where(self.is_cached, last, self.n_blocks)  # else: after all others

    def counts(self, is_counted: Bool[Tensor, "row seq"]) -> Int[Tensor, "row block"]:
        """Return how many of these keys are cached in each block."""
        one = is_counted.long()
        change = one.new_zeros(len(one), self.n_blocks + 1)
        change.scatter_add_(1, self.first, one)
        change.scatter_add_(1, (self.last + 1).clamp(max=self.n_blocks), -one)
        return change.cumsum(1)[:, : self.n_blocks]

    def work(self) -> Float[Tensor, ""]:
        """Return the blocks in which keys are cached, as a share of those without any eviction."""
        n_cached = torch.where(self.is_cached, self.last - self.first + 1, 0)
        return n_cached.sum().double() / (self.n_blocks - self.first).sum()


def _assign(blocks: CachedBlocks) -> tuple[Int[Tensor, "row seq"], Int[Tensor, ""]]:
    """Return a slot for each key, and the most slots that any row takes.

    Keys take slots in the order of their columns. The first n_shared keys, the most that are cached at once,
    take new slots. From then on the n-th key takes the slot of the (n - n_shared)-th key to be released, in
    the order of last blocks. It has been released by then, or more than n_shared keys would be cached.

    The keys evicted first have separate slots, after the others. When a compaction drops most of a long
    prompt, whole tiles of slots become empty for good, instead of slots scattered among survivors.
    """
    is_first_evicted = blocks.is_cached & (blocks.last == blocks.last.amin(1, keepdim=True))
    is_other = blocks.is_cached & ~is_first_evicted
    n_shared = blocks.counts(is_other).amax(1, keepdim=True)
    order = torch.where(is_other, blocks.last, blocks.n_blocks).argsort(dim=1, stable=True)
    number = is_other.cumsum(1) - 1
    released = order.gather(1, (number - n_shared).clamp(min=0))
    # Pointer jumping from each key to the first owner of its slot; a slot changes owner once per block.
    owner = torch.where(is_other & (number >= n_shared), released, blocks.column)
    for _ in range(blocks.n_blocks.bit_length()):
        owner = owner.gather(1, owner)
    own_slot = n_shared + is_first_evicted.cumsum(1) - 1
    slot_of = torch.where(is_first_evicted, own_slot, number.gather(1, owner))
    n_slots = (n_shared[:, 0] + is_first_evicted.sum(1)).amax()
    return slot_of.clamp(min=0).int(), n_slots
