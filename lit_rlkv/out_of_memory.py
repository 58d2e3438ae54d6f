"""Allocations that fail: how they are known, and how they are explained."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

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
"""How a failed allocation reads where it has no class of its own, as torch.OutOfMemoryError on CUDA is."""


class MemoryExhaustedError(MemoryError):
    """An allocation failed; the message says what needs how much, and which settings change that."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whichever device, or this error came of that: a graph of CUDA whose
    capture breaks off raises another one on top."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if any(text in str(error) for text in ALLOCATORS_SAY):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


@contextmanager
def explain_out_of_memory(explain: Callable[[], str]) -> Iterator[None]:
    """A block whose failed allocations end in what `explain` says of them; other errors pass as they are.

    Raises:
        MemoryExhaustedError: an allocation failed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryExhaustedError) or not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0] or type(error).__name__
        raise MemoryExhaustedError(f"{explain()}\nThe allocator: {said}") from error
