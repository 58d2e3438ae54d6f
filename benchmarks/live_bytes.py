"""Meters of memory: bytes of the tensors that are alive on a CPU; the allocator's own count on CUDA."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind these tensors; tied or shared ones count once."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operators have returned and that are still alive, of the calling thread.

    Sees the backward pass on a CPU and what is recomputed there, since both run in this thread. Not seen is
    what a kernel allocates and frees while it runs.

    Args:
        existing: tensors that are alive already and count from the start. Any others that were made before
            count from the first operator that returns a view of them.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        for tensor in existing:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        # Python's object of a storage lives as long as the storage itself, also where only autograd holds it.
        # Weights that oneDNN has packed have none, and are held by Python alone.
        storage = tensor if tensor.is_mkldnn else tensor.untyped_storage()
        key = id(storage)
        n_bytes = tensor.numel() * tensor.itemsize if tensor.is_mkldnn else storage.nbytes()
        if key in self._known:
            return

        def forget(_: Any) -> None:
            del self._known[key]
            self.live -= n_bytes

        self._known[key] = weakref.ref(storage, forget)
        self.live += n_bytes
        self.peak = max(self.peak, self.live)

    def peak_bytes(self) -> int:
        """Return the most bytes that were alive at once since the last reset."""
        return self.peak

    def reset_peak(self) -> None:
        """Start again from what is alive now."""
        self.peak = self.live


class CudaBytes:
    """The caching allocator's count of bytes in tensors, above what it had when the block was entered.

    Args:
        existing: tensors that are alive already and count from the start.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        self.n_existing = storage_bytes(existing)
        self.before = 0

    def __enter__(self) -> "CudaBytes":
        torch.cuda.synchronize()
        self.before = torch.cuda.memory_allocated() - self.n_existing
        self.reset_peak()
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.cuda.synchronize()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self.before

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


Meter = LiveBytes | CudaBytes
"""Counts inside of its `with` block."""
