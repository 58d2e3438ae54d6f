from typing import no_type_check

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_rlkv.kernels.backend import is_interpreted
from lit_rlkv.kernels.triton_functions import tanh

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = 4.0 if is_interpreted() else 8.0
"""Roundings: a GPU approximates the exponential, and the quotient, to about two each."""


@triton.jit
@no_type_check
def _tanh_of_all(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tanh(tl.load(x + at, mask=at < n)), mask=at < n)


def kernel_tanh(x: Tensor) -> Tensor:
    x = x.to(DEVICE)
    out = torch.full_like(x, torch.nan)
    _tanh_of_all[(triton.cdiv(len(x), 1024),)](x, out, len(x), BLOCK=1024)
    return out.cpu()


def roundings_off(actual: Tensor, x: Tensor) -> float:
    """Return the largest relative error, in roundings of float32."""
    truth = x.double().tanh()
    return float(((actual.double() - truth) / truth).abs().max() / torch.finfo(torch.float32).eps)


SIZES = [
    pytest.param(torch.logspace(-30, -3, 3000), id="tiny"),
    pytest.param(torch.linspace(1e-3, 1.0, 20001), id="around the seam at a quarter"),
    pytest.param(torch.linspace(1.0, 12.0, 3000), id="saturating"),
    pytest.param(torch.logspace(1, 38, 3000), id="huge"),
]


@pytest.mark.parametrize("x", SIZES)
def test_tanh_keeps_its_relative_precision_at_every_size(x: Tensor):
    assert roundings_off(kernel_tanh(x), x) <= BOUND


@pytest.mark.parametrize("x", SIZES)
def test_tanh_is_odd_bit_for_bit(x: Tensor):
    assert torch.equal(kernel_tanh(-x), -kernel_tanh(x))


def test_the_measure_catches_the_cancelling_formula():
    x = torch.logspace(-6, -3, 1000)
    assert roundings_off(1 - 2 / ((2 * x).exp() + 1), x) > 100.0


def test_tanh_at_the_edges():
    edges = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])
    torch.testing.assert_close(kernel_tanh(edges), torch.tensor([0.0, 1.0, -1.0, torch.nan]), equal_nan=True)
