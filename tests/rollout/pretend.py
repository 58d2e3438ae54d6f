"""A device that is pretended on a CPU: operators run on real numbers, and the rules of a GPU are kept.

Its tensors say that they are on `meta`, which any build of torch knows.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

THERE = torch.device("meta")
aten = torch.ops.aten
WAITS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero)
MOVES = (aten._to_copy, aten.copy_)
INDEXES = (aten.index, aten.index_put_, aten.index_put)


class OnDevice(Tensor):
    """A tensor on the pretended device; its numbers are in `numbers`."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> "OnDevice":
        like = {"dtype": real.dtype, "device": THERE, "strides": real.stride()}
        made = Tensor._make_wrapper_subclass(cls, real.shape, storage_offset=real.storage_offset(), **like)
        made.numbers = real
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of the pretended device")


def _indices(index: Any) -> Any:
    """Return an index in which lists are tensors of the device; torch would make them without numbers."""
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index).to(THERE) if isinstance(index, list) else index


class PretendedDevice(TorchDispatchMode):
    """Within the block, tensors can be on the device.

    Raises:
        RuntimeError: an operator gets tensors of the device and of the CPU.
    """

    waits: ClassVar[list[str]] = []
    """Operators for which the host waited, in this process."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wrapped: dict[int, OnDevice] = {}
        stays: list[Tensor] = []

        def unwrapped(tensor: Tensor) -> Tensor:
            if isinstance(tensor, OnDevice):
                wrapped[id(tensor.numbers)] = tensor
                return tensor.numbers
            if tensor.device == THERE:
                raise RuntimeError(f"{func} gets a tensor without numbers")
            if tensor.dim() > 0:
                stays.append(tensor)
            return tensor

        inner_args, inner = tree_map_only(Tensor, unwrapped, (args, kwargs))
        target = inner.get("device")
        if target is not None:
            inner["device"] = torch.device("cpu")
        packet = func.overloadpacket
        is_read = packet is aten._to_copy and target not in (None, THERE)
        if wrapped and (packet in WAITS or is_read):
            self.waits.append(str(packet))
        if wrapped and stays and packet in INDEXES and isinstance(args[0], OnDevice):
            self.waits.append(str(packet))  # indices may be on the CPU, and are copied
        elif wrapped and stays and packet not in MOVES:
            raise RuntimeError(f"{func} gets tensors of the device and of the CPU")
        if packet is aten.histc:  # of whole numbers on a GPU alone
            inner_args = (inner_args[0].float(), *inner_args[1:])
        result = func(*inner_args, **inner)
        is_there = bool(wrapped) if target is None else target == THERE
        if packet is aten.copy_:
            is_there = isinstance(args[0], OnDevice)
        if not is_there:
            return result
        return tree_map_only(
            Tensor, lambda found: wrapped[id(found)] if id(found) in wrapped else OnDevice(found), result
        )


class WatchedRunner:
    """Stand-in for `CudaGraphRunner`: runs a decode step, and refuses one that waits for the device."""

    def __init__(self, generator: Any, *, is_enabled: bool, is_required: bool = False) -> None:
        self.is_enabled = False

    def __call__(self, function: Callable[[], None]) -> None:
        before = len(PretendedDevice.waits)
        function()
        # The definition of eviction reads on the host which rows are due.
        if function.__name__ == "_decode" and (found := PretendedDevice.waits[before:]):
            raise RuntimeError(f"a step waits for the device: {found}")
