"""The processes that train together, as the parts of a run see them."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast
from weakref import WeakMethod

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor


class Ranks:
    """One process alone, which has all there is."""

    rank = 0
    size = 1

    def all_gather(self, values: Tensor) -> Tensor:
        """The rows of all ranks, one rank after the other; each must bring as many, of one shape."""
        return values

    def all_gather_object(self, values: Sequence[Any]) -> list[Any]:
        """The same of plain objects; ranks may bring different numbers of them."""
        return list(values)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """The sum of the ranks' tensors, of one shape."""
        return self.all_gather(values[None]).sum(dim=0)

    def all_reduce_max(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return int(max(self.all_gather_object([number])))

    def local_rows(self, n_rows: int) -> slice:
        """Where this rank's rows are among those of all, when each has `n_rows`."""
        return slice(self.rank * n_rows, (self.rank + 1) * n_rows)


SINGLE_PROCESS = Ranks()
COLLECTIVE_TIMEOUT = timedelta(hours=6)
"""Longest that a rank waits for another, which may still sample; one that has ended is noticed by others."""


class ForwardCoordinator:
    """Lets ranks do different numbers of forwards where a forward is an exchange between all of them.

    So it is where weights lie in shards: every rank must give its part of a layer for any rank to use it.
    Before a forward a rank asks for what it needs; ranks agree on the highest number asked for, and those
    that need something else give their parts and ask again. A rank that has come to any other exchange needs
    nothing, and so keeps the others company until all have come there.
    """

    def __init__(self) -> None:
        self.gives: list[WeakMethod[Callable[[], None]]] = []
        self.afterwards: list[WeakMethod[Callable[[], None]]] = []
        self.group: dist.ProcessGroup | None = None

    def add(self, give: Callable[[], None]) -> int:
        """The number to ask for what all ranks provide by this method; they must add the same ones alike.

        It is not kept alive by that, and where it is gone nobody can ask for it.
        """
        if self.group is None:
            # On the CPU, so that no rank waits for its accelerator to know what comes next.
            self.group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self.gives.append(WeakMethod(give))
        return len(self.gives)

    def on_exchange(self, call: Callable[[], None]) -> None:
        """Call a method, while it lives, each time that all ranks have come to another exchange."""
        self.afterwards.append(WeakMethod(call))

    def ask(self, number: int) -> None:
        """Provide what others ask for until it is the turn of this number."""
        while (agreed := self._agreed(number)) != number:
            _call(self.gives[agreed - 1])

    def wait(self) -> None:
        """To be called before anything else is exchanged."""
        if self.gives:
            self.ask(0)
            for call in self.afterwards:
                _call(call)

    def _agreed(self, number: int) -> int:
        asked = torch.tensor(number)
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self.group)
        return int(asked)


def _call(reference: WeakMethod[Callable[[], None]]) -> None:
    if (method := reference()) is not None:
        method()


FORWARD_COORDINATOR = ForwardCoordinator()
"""One for the process, as the processes that it exchanges with are."""


def over_ranks(values: Tensor) -> Tensor:
    """The sum over all processes that train together, where only tensors are at hand."""
    if dist.is_available() and dist.is_initialized():
        FORWARD_COORDINATOR.wait()
        values = values.clone()
        dist.all_reduce(values)
    return values


class FabricRanks(Ranks):
    """The processes of a Fabric. What one asks for, all must ask for, in the same order."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.rank = fabric.global_rank
        self.size = fabric.world_size

    def all_gather(self, values: Tensor) -> Tensor:
        if values.numel() == 0:
            return values.new_zeros((self.size * len(values), *values.shape[1:]))
        FORWARD_COORDINATOR.wait()
        sent = values.to(torch.uint8) if values.dtype == torch.bool else values
        found = cast(Tensor, self.fabric.all_gather(sent.contiguous()))
        return found.flatten(0, 1).to(values.dtype).to(values.device)

    def all_gather_object(self, values: Sequence[Any]) -> list[Any]:
        FORWARD_COORDINATOR.wait()
        found: list[Any] = [None] * self.size
        # Objects of this run's own processes, which trust each other.
        dist.all_gather_object(found, list(values))
        return [value for of_rank in found for value in of_rank]


def ranks_of(fabric: Fabric) -> Ranks:
    """The ranks of a launched Fabric."""
    return SINGLE_PROCESS if fabric.world_size == 1 else FabricRanks(fabric)
