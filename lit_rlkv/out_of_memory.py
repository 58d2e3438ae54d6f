"""Failed allocations: detection and explanation."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from lit_rlkv.checks import OneLineError

ALLOCATORS_SAY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # on Windows
    "Storage size calculation overflowed",  # more bytes than 64 bits can count
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
    "std::bad_alloc",
)
"""Messages of failed allocations that raise a plain RuntimeError."""


class MemoryExhaustedError(OneLineError, MemoryError):
    """An allocation failed; the message names the need and the settings to change."""

    tokens_per_pass: int | None = None
    """Tokens of the pass of the learner that did not fit; None if something else did not."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation failed, or caused this error, as in a CUDA graph capture that broke off."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if any(text in str(error) for text in ALLOCATORS_SAY):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that torch had on a CUDA device, or that this process had in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # Windows has none

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@contextmanager
def explain_out_of_memory(
    explain: Callable[[], str], tokens_per_pass: Callable[[], int] | None = None
) -> Iterator[None]:
    """Replace the error of a failed allocation in the block by the text of `explain`.

    Args:
        tokens_per_pass: returns the tokens of the passes in the block; None if it has none.

    Raises:
        MemoryExhaustedError: an allocation failed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryExhaustedError) or not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0] or type(error).__name__
        exhausted = MemoryExhaustedError(f"{explain()}\nThe allocator: {said}")
        exhausted.tokens_per_pass = None if tokens_per_pass is None else tokens_per_pass()
        raise exhausted from error
