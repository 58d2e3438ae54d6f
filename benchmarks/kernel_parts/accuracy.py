"""The gate before the clock: what is wrong is not timed."""

from collections.abc import Mapping

import torch
from torch import Tensor

LIMIT = 4.0
"""Largest error, in units of plain PyTorch's own at that dtype. It tells a wrong kernel from rounding; how
accurate a right one is, is measured in the tests."""


class WrongKernelError(RuntimeError):
    """The kernel's result is not the definition's, so that its time means nothing."""


def excess_error(actual: Tensor, plain: Tensor, truth: Tensor) -> float:
    """Largest error over that of plain PyTorch, which is at least one rounding of the largest value."""
    if not actual.isfinite().all():
        return float("inf")
    actual, plain, truth = (tensor.detach() for tensor in (actual, plain, truth.double()))
    rounding = torch.finfo(plain.dtype).eps * truth.abs().max()
    own = torch.maximum((plain.double() - truth).abs().max(), rounding)
    return float((actual.double() - truth).abs().max() / own.clamp(min=torch.finfo(torch.float64).tiny))


def require_accurate(name: str, results: Mapping[str, tuple[Tensor, Tensor, Tensor]]) -> float:
    """The largest excess error of (actual, plain, truth) over all results.

    Raises:
        WrongKernelError: one of them is above the limit.
    """
    errors = {result: excess_error(*values) for result, values in results.items()}
    worst = max(errors, key=lambda result: errors[result])
    if not errors[worst] <= LIMIT:
        raise WrongKernelError(
            f"{name}: {worst} is off by {errors[worst]:.3g} of plain PyTorch's own errors, above {LIMIT}: it "
            "is wrong and is not timed; run the tests of the kernel"
        )
    return errors[worst]


def require_equal(name: str, results: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """0, the error of (actual, expected) that are the same to the bit.

    Raises:
        WrongKernelError: some are not.
    """
    for result, (actual, expected) in results.items():
        n_wrong = int((actual != expected).sum())
        if n_wrong:
            raise WrongKernelError(
                f"{name}: {n_wrong} of {actual.numel()} values of {result} differ from the definition: "
                "it is wrong and is not timed; run the tests of the kernel"
            )
    return 0.0
