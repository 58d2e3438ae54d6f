"""Allocations that fail, and errors that are none."""

import pytest
import torch

from lit_rlkv.out_of_memory import MemoryExhaustedError, explain_out_of_memory, is_out_of_memory


def too_large(*shape):
    return torch.empty(*shape, dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(2**50,), (2**62, 4)])
def test_an_allocation_that_fails_is_explained_and_chained(shape):
    explanations = iter(["so large, because", "never asked for"])
    with (
        pytest.raises(MemoryExhaustedError, match=r"^so large, because\nThe allocator: ") as caught,
        explain_out_of_memory(lambda: "never: the inner one knows more"),
        explain_out_of_memory(lambda: next(explanations)),
    ):
        too_large(*shape)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert str(caught.value.__cause__).partition("\n")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory, said a user's file"), False),
    ],
)
def test_only_failed_allocations_are_taken_for_such(error, expected):
    assert is_out_of_memory(error) is expected


def broken_off():
    try:
        too_large(2**50)
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_errors_caused_by_a_failed_allocation_count_as_out_of_memory():
    with pytest.raises(RuntimeError, match="capture") as caught:
        broken_off()
    assert is_out_of_memory(caught.value)
    caught.value.__context__ = None
    assert not is_out_of_memory(caught.value)


def test_any_other_error_passes_an_explanation_as_it_is():
    other = RuntimeError("expected scalar type Float but found Half")

    def explain():
        pytest.fail("nobody asked")

    with pytest.raises(RuntimeError) as caught, explain_out_of_memory(explain):
        raise other
    assert caught.value is other
