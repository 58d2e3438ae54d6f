"""The processes that train together, as the parts of a run see them."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor


class Ranks:
    """One process alone, which has all there is."""

    rank = 0
    size = 1

    def gather(self, values: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other; each must bring as many, of one shape."""
        return values

    def gather_list(self, values: Sequence[Any]) -> list[Any]:
        """The same of plain objects; ranks may bring different numbers of them."""
        return list(values)

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return int(max(self.gather_list([number])))

    def mine(self, n_rows: int) -> slice:
        """Where this rank's rows are among those of all, when each has `n_rows`."""
        return slice(self.rank * n_rows, (self.rank + 1) * n_rows)


ALONE = Ranks()


def over_ranks(values: Tensor) -> Tensor:
    """The sum over all processes that train together, where only tensors are at hand."""
    if dist.is_available() and dist.is_initialized():
        values = values.clone()
        dist.all_reduce(values)
    return values


class FabricRanks(Ranks):
    """The processes of a Fabric. What one asks for, all must ask for, in the same order."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.rank = fabric.global_rank
        self.size = fabric.world_size

    def gather(self, values: Tensor) -> Tensor:
        if values.numel() == 0:
            return values.new_zeros((self.size * len(values), *values.shape[1:]))
        sent = values.to(torch.uint8) if values.dtype == torch.bool else values
        found = cast(Tensor, self.fabric.all_gather(sent.contiguous()))
        return found.flatten(0, 1).to(values.dtype).to(values.device)

    def gather_list(self, values: Sequence[Any]) -> list[Any]:
        found: list[Any] = [None] * self.size
        # Objects of this run's own processes, which trust each other.
        dist.all_gather_object(found, list(values))
        return [value for of_rank in found for value in of_rank]


def ranks_of(fabric: Fabric) -> Ranks:
    """The ranks of a launched Fabric."""
    return ALONE if fabric.world_size == 1 else FabricRanks(fabric)
