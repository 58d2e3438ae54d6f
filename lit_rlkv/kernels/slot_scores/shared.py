"""Loads and arguments shared by the kernels of slot scores; imported from a kernel.py only."""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
@no_type_check
def load_vectors(vectors, slot, is_wanted, slot_stride, dim, DIM: tl.constexpr):
    """Load [slot, DIM] in the dtype of the pool; 0 in slots not wanted and behind the last dimension."""
    d = tl.arange(0, DIM)
    at = slot.to(tl.int64)[:, None] * slot_stride + d[None, :]
    return tl.load(vectors + at, mask=is_wanted[:, None] & (d < dim)[None, :], other=0.0)


@triton.jit
@no_type_check
def load_flags(flags, slot, n_slots):
    """Load the booleans of a block of slots, False behind the last."""
    return tl.load(flags + slot, mask=slot < n_slots, other=0) != 0


@triton.jit
@no_type_check
def is_row_due(is_due, row, HAS_DUE: tl.constexpr):
    """Return True if the scores of a row will be read; all rows are without a list of due rows."""
    return tl.load(is_due + row) != 0 if HAS_DUE else True


def due_argument(is_due: Tensor | None, other: Tensor) -> tuple[Tensor, bool]:
    """Return the pointer to the due rows and True, or any pointer and False if all rows are due."""
    return (other, False) if is_due is None else (is_due.contiguous(), True)


def layout(keys: Tensor) -> tuple[int, ...]:
    """Return the strides of row, KV head and slot, and the numbers of KV heads, slots and dimensions."""
    return (*keys.stride()[:3], keys.shape[1], keys.shape[2], keys.shape[3])
