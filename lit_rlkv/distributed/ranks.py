"""Collectives over the processes of a run, and the coordination of their forwards."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast
from weakref import WeakMethod

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor


class Ranks:
    """A single process; subclasses have several."""

    rank = 0
    size = 1

    def all_gather(self, values: Tensor) -> Tensor:
        """Concatenate the rows of all ranks in rank order; shapes must be equal."""
        return values

    def all_gather_object(self, values: Sequence[Any]) -> list[Any]:
        """Concatenate lists of objects in rank order; lengths may differ."""
        return list(values)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors; shapes must be equal."""
        return self.all_gather(values[None]).sum(dim=0)

    def all_reduce_max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return int(max(self.all_gather_object([number])))

    def local_rows(self, n_rows: int) -> slice:
        """Return the place of this rank's rows among those of all ranks, each with `n_rows`."""
        return slice(self.rank * n_rows, (self.rank + 1) * n_rows)


SINGLE_PROCESS = Ranks()
COLLECTIVE_TIMEOUT = timedelta(hours=6)
"""Longest wait for another rank, which may still be sampling; ended processes are noticed elsewhere."""


class ForwardCoordinator:
    """Lets ranks run different numbers of forwards although each forward is a collective.

    With sharded weights every rank must provide its part of a layer before any rank can use it. Before a
    forward, a rank requests an action by its number. Ranks agree on the highest number requested; ranks that
    requested another one take part in it and request again. A rank that has reached any other collective
    requests 0, so it serves the others until all have reached it.
    """

    def __init__(self) -> None:
        self.gives: list[WeakMethod[Callable[[], None]]] = []
        self.afterwards: list[WeakMethod[Callable[[], None]]] = []
        self.group: dist.ProcessGroup | None = None

    def add(self, give: Callable[[], None]) -> int:
        """Register an action that all ranks perform together, and return its number.

        All ranks must add the same actions in the same order. The method's object is not kept alive.
        """
        if self.group is None:
            # On the CPU, so that no rank waits for its accelerator.
            self.group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self.gives.append(WeakMethod(give))
        return len(self.gives)

    def on_exchange(self, call: Callable[[], None]) -> None:
        """Register a method to call each time that all ranks have reached another collective."""
        self.afterwards.append(WeakMethod(call))

    def ask(self, number: int) -> None:
        """Take part in the actions that others request until this number is agreed on."""
        while (agreed := self._agreed(number)) != number:
            _call(self.gives[agreed - 1])

    def wait(self) -> None:
        """Wait until all ranks have reached this point; call it before any other collective."""
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
"""The coordinator of this process."""


def over_ranks(values: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes, without a Fabric."""
    if dist.is_available() and dist.is_initialized():
        FORWARD_COORDINATOR.wait()
        values = values.clone()
        dist.all_reduce(values)
    return values


class FabricRanks(Ranks):
    """The processes of a Fabric; all ranks must call the same methods in the same order."""

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
        # Pickles come only from processes of this run.
        dist.all_gather_object(found, list(values))
        return [value for of_rank in found for value in of_rank]


def ranks_of(fabric: Fabric) -> Ranks:
    """Return the ranks of a launched Fabric."""
    return SINGLE_PROCESS if fabric.world_size == 1 else FabricRanks(fabric)
