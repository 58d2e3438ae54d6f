"""A CUDA graph on a CPU: record a function's operators once, then run them without its Python."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
"""Operators whose results the host must wait for, so that no graph can hold them."""


class Recording(TorchDispatchMode):
    """Operators with the very tensors that they read and wrote: like a graph, it knows addresses only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in WAITS:
            raise RuntimeError(f"{func} waits for the device")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Run the operators again; what they return goes to where it went the first time."""
        for func, args, kwargs, recorded in self.calls:
            for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(recorded), strict=True):
                if isinstance(new, Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class RecordedRunner:
    """Stand-in for `CudaGraphRunner`: runs two calls, records the third, and replays it from then on.

    Only the decode step is recorded, because eviction's definition reads on the host which rows are full.
    """

    n_replays = 0

    def __init__(
        self, generator: torch.Generator | None, *, is_enabled: bool, is_required: bool = False
    ) -> None:
        self.is_enabled = True
        self.n_calls = 0
        self.recording = Recording()

    def __call__(self, function: Callable[[], None]) -> None:
        self.n_calls += 1
        is_step = function.__name__ == "_decode"
        if is_step and self.n_calls > 3:
            self.recording.replay()
            RecordedRunner.n_replays += 1
        elif is_step and self.n_calls == 3:
            with self.recording:
                function()
        else:
            function()
