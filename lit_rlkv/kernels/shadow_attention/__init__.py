"""Shadow attention: the learner's attention over exactly the keys that the rollout's cache still held."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lit_rlkv.kernels.backend import autocast_dtype, uses_reference, with_triton
from lit_rlkv.kernels.shadow_attention import blocks, flash, reference
from lit_rlkv.kernels.shadow_attention.plan import SlotPlan, layer_table, plan_slots
from lit_rlkv.kernels.shadow_attention.segment_plan import LayerSegments, SegmentPlan, plan_segments
from lit_rlkv.kernels.shadow_attention.segments import segment_attention
from lit_rlkv.kernels.shadow_attention.tiles import MAX_HEAD_DIM

__all__ = [
    "METHODS",
    "LayerSegments",
    "SegmentPlan",
    "SlotPlan",
    "layer_table",
    "plan_segments",
    "plan_slots",
    "segment_attention",
    "set_shadow_attention",
    "shadow_attention",
    "shadow_attention_with_lse",
    "takes_segments",
    "use_shadow_attention",
]

METHODS = ("lists", "segments")
_method = "lists"
"""The choice of the process."""


def set_shadow_attention(method: str) -> None:
    """Set how the process computes shadow attention: by lists of keys, or in segments where it can.

    Raises:
        ValueError: `method` is not in `METHODS`.
    """
    global _method
    if method not in METHODS:
        raise ValueError(f"shadow attention must be computed by one of {', '.join(METHODS)}, got {method!r}")
    _method = method


@contextmanager
def use_shadow_attention(method: str) -> Iterator[None]:
    """Set the method within a `with` block, and restore the previous one at its end."""
    before = _method
    set_shadow_attention(method)
    try:
        yield
    finally:
        set_shadow_attention(before)


def takes_segments(device: str, dtype: torch.dtype, width: int, softcap: float | None) -> bool:
    """Return True if attention is computed in segments: they are chosen, and torch has a kernel.

    Short segments, which cost too much, have no plan; see `plan_segments`.

    Args:
        dtype: of the queries, before autocast.
        width: dimensions of a head's queries and keys or its values, whichever are more.
    """
    is_chosen = _method == "segments" and not uses_reference()
    return is_chosen and flash.fits(device, autocast_dtype(device, dtype), width, softcap)


def _load_kernels() -> ModuleType:
    from lit_rlkv.kernels.shadow_attention import ops

    return ops


def _fits(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> bool:
    return max(query.shape[-1], value.shape[-1]) <= MAX_HEAD_DIM


shadow_attention = with_triton(blocks.shadow_attention, _load_kernels, chosen_by="query", fits=_fits)
shadow_attention_with_lse = with_triton(
    reference.shadow_attention_with_lse, _load_kernels, chosen_by="query", fits=_fits
)
