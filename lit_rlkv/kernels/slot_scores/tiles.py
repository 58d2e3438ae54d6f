"""Loads that the kernels of this room share; to be imported where Triton is, from a kernel.py."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def load_vectors(vectors, slot, is_wanted, slot_stride, dim, DIM: tl.constexpr):
    """[slot, DIM] in the dtype of the pool; zeros in slots not wanted and behind the last dimension."""
    d = tl.arange(0, DIM)
    at = slot.to(tl.int64)[:, None] * slot_stride + d[None, :]
    return tl.load(vectors + at, mask=is_wanted[:, None] & (d < dim)[None, :], other=0.0)


@triton.jit
@no_type_check
def load_flags(flags, slot, n_slots):
    """Booleans of a block of slots, False behind the last."""
    return tl.load(flags + slot, mask=slot < n_slots, other=0) != 0


@triton.jit
@no_type_check
def is_row_due(is_due, row, HAS_DUE: tl.constexpr):
    """Whether the scores of a row will be read; without a list of such rows, all of them are."""
    return tl.load(is_due + row) != 0 if HAS_DUE else True
