"""Where each key stays while it lives, for all layers of a forward: it makes the learner's cost fall."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BLOCK = 128
"""Queries that share a list of keys. Fewer of them shorten the lists by what lives in a part of a block only,
and start the loops over the lists more often."""

MAX_WORK = 0.75
"""Share of dense causal work above which following lists costs more than it saves."""

MAX_ENTRIES = 256
"""Of a table per position and KV head, 4 bytes each: 32,768 slots in blocks of 128. Memory stays linear."""


@dataclass(frozen=True)
class SlotPlan:
    """A slot for every key that lives; keys that live in the same block of queries never share one.

    It belongs to the eviction table it was made from: with another one results are wrong.
    """

    block: int
    """Queries in a block: a power of two, at most 128."""
    n_slots: int
    """Of every sequence, layer and KV head: as many as the one that needs most."""
    slot_of: Int[Tensor, "batch *layer kv_head seq"]
    """Means nothing for keys that never live."""

    def layer(self, index: int) -> "SlotPlan":
        """The plan of one layer, as the operation takes it; a plan of one layer serves all of them."""
        return SlotPlan(self.block, self.n_slots, self.slot_of[:, index if self.slot_of.shape[1] > 1 else 0])


def plan_slots(evicted_at: Int[Tensor, "batch layer kv_head seq"], block: int = BLOCK) -> SlotPlan | None:
    """The slots of a whole eviction table. The host waits for the device once.

    None where lists of the living do not pay because few keys die, or where so many live at once that the
    tables would outgrow the sequence.

    Args:
        block: queries that share a list of keys.

    Raises:
        ValueError: `block` is no power of two from 1 to `BLOCK`.
    """
    if block & (block - 1) or not 0 < block <= BLOCK:
        raise ValueError(f"block={block} is no power of two from 1 to {BLOCK}; choose one, or leave it out")
    slots, needs, works = [], [], []
    for layer in evicted_at.unbind(
        1
    ):  # one after the other, because sorting takes several times their memory
        lives = _Lives(layer.flatten(0, 1), block)
        slot_of, n_slots = _assign(lives)
        slots.append(slot_of.view(layer.shape))
        needs.append(n_slots)
        works.append(lives.work())
    need, work = torch.stack([torch.stack(needs).amax().double(), torch.stack(works).mean()]).tolist()
    if work > MAX_WORK or need > MAX_ENTRIES * block:
        return None
    return SlotPlan(block, max(1, int(need)), torch.stack(slots, dim=1))


class _Lives:
    """In which blocks of queries each key lives; rows are the KV heads of all sequences."""

    def __init__(self, evicted_at: Int[Tensor, "row seq"], block: int) -> None:
        self.birth = torch.arange(evicted_at.shape[1], device=evicted_at.device)
        self.is_living = evicted_at > self.birth
        self.n_blocks = -(-evicted_at.shape[1] // block)
        self.first = (self.birth // block).expand_as(evicted_at)
        last = (evicted_at.clamp(max=evicted_at.shape[1]).long() - 1) // block
        self.last = torch.where(self.is_living, last, self.n_blocks)  # else: after all others

    def counts(self, is_counted: Bool[Tensor, "row seq"]) -> Int[Tensor, "row block"]:
        """How many of these keys live in each block."""
        one = is_counted.long()
        change = one.new_zeros(len(one), self.n_blocks + 1)
        change.scatter_add_(1, self.first, one)
        change.scatter_add_(1, (self.last + 1).clamp(max=self.n_blocks), -one)
        return change.cumsum(1)[:, : self.n_blocks]

    def work(self) -> Float[Tensor, ""]:
        """Blocks in which each key lives, over those in which it would if none died."""
        n_lived = torch.where(self.is_living, self.last - self.first + 1, 0)
        return n_lived.sum().double() / (self.n_blocks - self.first).sum()


def _assign(lives: _Lives) -> tuple[Int[Tensor, "row seq"], Int[Tensor, ""]]:
    """A slot for each key, and the most slots that any row takes.

    Keys take slots in the order of their birth: new ones while there are fewer than will ever be needed at
    once, and from then on the n-th key takes the slot of the (n - n_shared)-th to be released, in the order
    of their last blocks. So many have been released by then, since otherwise more would live at once.

    The keys that die first of all have slots to themselves, behind the others'. After a compaction that drops
    most of a long prompt these are then empty for good, in whole tiles, and not scattered among survivors.
    """
    dies_first = lives.is_living & (lives.last == lives.last.amin(1, keepdim=True))
    is_other = lives.is_living & ~dies_first
    n_shared = lives.counts(is_other).amax(1, keepdim=True)
    order = torch.where(is_other, lives.last, lives.n_blocks).argsort(dim=1, stable=True)
    number = is_other.cumsum(1) - 1
    released = order.gather(1, (number - n_shared).clamp(min=0))
    # From each key to the first in its slot, twice as far at every step; none takes over twice in one block.
    owner = torch.where(is_other & (number >= n_shared), released, lives.birth)
    for _ in range(lives.n_blocks.bit_length()):
        owner = owner.gather(1, owner)
    own_slot = n_shared + dies_first.cumsum(1) - 1
    slot_of = torch.where(dies_first, own_slot, number.gather(1, owner))
    n_slots = (n_shared[:, 0] + dies_first.sum(1)).amax()
    return slot_of.clamp(min=0).int(), n_slots
