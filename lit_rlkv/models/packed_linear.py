"""Linear layers that decode faster on a CPU: their weights in oneDNN's blocked layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.backends import mkldnn

from lit_rlkv.distributed.fsdp import is_sharded
from lit_rlkv.models.lm_head import LMHead

LEAST_ELEMENTS = 100_000
"""Smaller matrices are not packed."""


@contextmanager
def packed_weights(model: nn.Module, n_rows: int) -> Iterator[None]:
    """Pack the large float32 matrices of a model on a CPU for a `with` block without gradients or updates.

    Otherwise each product of a few rows rearranges the weight again; benchmarks/cpu_speed.py times decoding
    beside transformers. The copy takes the memory of the weights once more, and results differ by rounding.

    Args:
        n_rows: rows that the layers will see most often.
    """
    linears = _linears_to_pack(model)
    try:
        for linear in linears:
            packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), n_rows)
            linear.forward = partial(_forward, packed, linear.bias)  # type: ignore[method-assign]
        yield
    finally:
        for linear in linears:
            vars(linear).pop("forward", None)  # the method of the class again


def packed_size(model: nn.Module) -> int:
    """Return the elements that `packed_weights` copies, or on the meta device would copy on a CPU."""
    return sum(linear.weight.numel() for linear in _linears_to_pack(model))


def _linears_to_pack(model: nn.Module) -> list[nn.Linear]:
    return [] if is_sharded(model) else [m for m in model.modules() if _can_be_packed(m)]


def _forward(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _can_be_packed(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(module) in (nn.Linear, LMHead)
        and "forward" not in vars(module)
        and module.weight.device.type in ("cpu", "meta")
        and module.weight.dtype == torch.float32
        and module.weight.numel() >= LEAST_ELEMENTS
        and bool(mkldnn.is_available() and mkldnn.enabled)  # type: ignore[no-untyped-call]
        and not torch.is_autocast_enabled("cpu")
    )
