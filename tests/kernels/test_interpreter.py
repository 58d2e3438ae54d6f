"""The interpreter, in which all kernels are tested where there is no GPU."""

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("kernels are compiled", allow_module_level=True)

import triton
import triton.language as tl

import lit_rlkv.kernels  # noqa: F401  # repairs the interpreter


@triton.jit
def _count(out, end, STEP: tl.constexpr):
    n = 0
    for _ in range(0, end, STEP):
        n += 1
    tl.store(out, n)


# numpy 2.5 refuses what numpy 2.4 warns of.
@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_a_kernel_counts_up_to_a_number_that_it_is_given():
    out = torch.zeros(1, dtype=torch.int32)
    _count[1,](out, 7, STEP=2)
    assert out.item() == 4
