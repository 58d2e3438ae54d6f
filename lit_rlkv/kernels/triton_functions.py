"""Functions shared by Triton kernels. Import it from kernel files only: Triton exists on Linux only."""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
@no_type_check
def tanh(x):
    """Return tanh of float32, accurate to a few roundings for every x; NaN stays NaN.

    Triton's own tanh is libdevice's, which the interpreter lacks.
    """
    size = tl.abs(x)
    # e^(-2|x|) never overflows. Below 1/4 the difference 1 - e^(-2|x|) would cancel; there the series up to
    # x^9 has a relative error of 1e-8.
    decayed = tl.exp(-2.0 * size)
    near = tl.minimum(size, 0.25)
    square = near * near
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    far = (1.0 - decayed) / (1.0 + decayed)
    return tl.where(size < 0.25, x * series, tl.where(x < 0, -far, far))


@triton.jit
@no_type_check
def load_vectors(vectors, slot, is_wanted, slot_stride, dim, DIM: tl.constexpr):
    """Load [slot, DIM] in the dtype of the pool; 0 in slots not wanted and beyond the last dimension."""
    d = tl.arange(0, DIM)
    at = slot.to(tl.int64)[:, None] * slot_stride + d[None, :]
    return tl.load(vectors + at, mask=is_wanted[:, None] & (d < dim)[None, :], other=0.0)


@triton.jit
@no_type_check
def load_flags(flags, slot, n_slots):
    """Load the booleans of a block of slots; False beyond the last slot."""
    return tl.load(flags + slot, mask=slot < n_slots, other=0) != 0


@triton.jit
@no_type_check
def is_row_due(is_due, row, HAS_DUE: tl.constexpr):
    """Return True if the scores of a row will be read; without HAS_DUE all rows are due."""
    return tl.load(is_due + row) != 0 if HAS_DUE else True


def due_argument(is_due: Tensor | None, other: Tensor) -> tuple[Tensor, bool]:
    """Return `is_due` and True; if all rows are due, any tensor and False (the value of HAS_DUE)."""
    return (other, False) if is_due is None else (is_due.contiguous(), True)
