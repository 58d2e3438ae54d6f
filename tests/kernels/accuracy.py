"""Errors against float64, in units of plain PyTorch's error at the same dtype."""

import torch
from torch import Tensor

from lit_rlkv.kernels.backend import is_interpreted

LENGTHS = (1, 17, 33, 63, 130)
GROUPS = (1, 2, 4, 7)


def excess_error(actual: Tensor, plain: Tensor, truth: Tensor, condition: float = 1.0) -> float:
    """Largest error of `actual` over that of `plain`, which is at least one rounding of the largest value.

    What was not written is NaN or infinite and counts as an infinite error.

    Args:
        condition: roundings of the largest value that one rounding on the way may cost. One of an exponent x
            changes exp(x) by |x| roundings; how plain PyTorch's happen to cancel depends on the processor.
    """
    if not actual.isfinite().all():
        return float("inf")
    rounding = condition * torch.finfo(plain.dtype).eps * truth.abs().max()
    own = torch.maximum((plain.double() - truth).abs().max(), rounding)
    return float((actual.double() - truth).abs().max() / own)


def bound(dtype: torch.dtype) -> float:
    """Return the largest error allowed, in units of plain PyTorch's error."""
    if dtype == torch.float32:
        # The unit may be a single rounding, and how those of a sum cancel depends on the width of the
        # processor's vectors. A mistake is far outside: an operand in 16 bits costs thousands of such units.
        return 8.0
    if not is_interpreted():
        # On a GPU exponentials and quotients are approximations, each right to about two roundings, and the
        # compiler fuses products with sums; the interpreter rounds every step as plain PyTorch does.
        return 4.0
    # Triton's interpreter truncates on stores to bfloat16, which real devices round.
    return 3.0 if dtype == torch.bfloat16 else 2.0
