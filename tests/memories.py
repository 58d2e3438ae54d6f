"""A host memory apart from the device's, pretended on a CPU: operators that mix both fail, as on a GPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HOST = torch.device("meta")
"""Name of the pretended memory, of a device that is nowhere; tensors on the CPU are those of the device."""
MOVES = (torch.ops.aten.copy_.default,)
"""Operators that may read one memory and write the other, beside those with a `device`."""


class OnHost(Tensor):
    """A tensor of the pretended memory."""

    @staticmethod
    def __new__(cls, data: Tensor) -> "OnHost":
        layout = {"strides": data.stride(), "storage_offset": data.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=HOST, **layout)

    def __init__(self, data: Tensor) -> None:
        self.values = data

    def tolist(self) -> Any:
        return self.values.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_host = [isinstance(tensor, OnHost) for tensor in given]
    if any(is_host) and not all(is_host) and func not in MOVES:
        raise RuntimeError(f"{func} of tensors of two memories")
    goes_to = kwargs.get("device")
    stays = any(is_host) if goes_to is None else goes_to.type == HOST.type
    kwargs = kwargs | ({} if goes_to is None else {"device": torch.device("cpu")})
    own = {id(tensor.values): tensor for tensor in given if isinstance(tensor, OnHost)}
    args, kwargs = tree_map(lambda leaf: leaf.values if isinstance(leaf, OnHost) else leaf, (args, kwargs))
    found = func(*args, **kwargs)

    def named(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return own[id(value)] if id(value) in own else OnHost(value)

    return tree_map(named, found) if stays else found


class _TwoMemories(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def two_memories() -> Iterator[None]:
    """Within this block records wait in the pretended memory."""
    with pytest.MonkeyPatch.context() as patch, _TwoMemories():
        for module in ("recorders", "expert_record", "mask_record", "generate"):
            patch.setattr(sys.modules[f"lit_rlkv.rollout.{module}"], "HOST", HOST)
        yield
