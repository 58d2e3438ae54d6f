"""Functions shared by Triton kernels; imported from a kernel.py only, because Triton is for Linux only."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def tanh(x):
    """tanh of float32 to a few roundings of the result, for every size of x; NaN stays NaN.

    Triton's own is libdevice's, which its interpreter lacks.
    """
    size = tl.abs(x)
    # e^(-2|x|) never overflows. Below 1/4 the difference 1 - e^(-2|x|) would cancel; there the series up to
    # x^9 is off by 1e-8 of the result.
    decayed = tl.exp(-2.0 * size)
    near = tl.minimum(size, 0.25)
    square = near * near
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    far = (1.0 - decayed) / (1.0 + decayed)
    return tl.where(size < 0.25, x * series, tl.where(x < 0, -far, far))
