import math

import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.quantization import (
    KV_DTYPES,
    NEAR_MIDDLE,
    dequantize,
    quantize,
    quantized,
    quantized_bytes,
    record_bytes,
    record_of,
)

STEPS: dict[str, float] = {"int8": 1 / 127, "fp8": 2.0**-3, "int4": 2 / 15}
"""Distance of neighbouring numbers at most, relative to the largest one of a vector."""


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_int8_matches_hand_arithmetic():
    # scale = 127 / 127 = 1; 2.4 and -2.6 round to 2 and -3
    codes, scales = quantize(torch.tensor([127.0, 2.4, -2.6, 0.0]), "int8")
    assert codes.view(torch.int8).tolist() == [127, 2, -3, 0]
    assert scales.tolist() == [1.0]


def test_fp8_matches_hand_arithmetic():
    # scale = 448 / 448 = 1; in e4m3 the neighbours of 3.1 are 3 and 3.25, those of 0.003 are 2^-9 and 2^-8
    x = quantized(torch.tensor([-448.0, 3.1, 0.003]), "fp8")
    assert x.tolist() == [-448.0, 3.0, 2.0**-8]


def test_int4_matches_hand_arithmetic():
    # zero = -5, scale = (10 + 5) / 15 = 1; codes are x + 5, and 0.4 + 5 rounds to 5
    codes, scales = quantize(torch.tensor([-5.0, 10.0, 0.4, 4.0]), "int4")
    assert codes.tolist() == [0 | 5 << 4, 15 | 9 << 4]  # number j with number j + 2
    assert scales.tolist() == [1.0, -5.0]
    assert dequantize(codes, scales, "int4", torch.float32).tolist() == [-5.0, 10.0, 0.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_no_number_moves_further_than_half_a_step(kv_dtype: str, dtype: torch.dtype):
    x = draw(200, 64, dtype=dtype)
    error = (quantized(x, kv_dtype).double() - x.double()).abs().amax(-1)
    largest = x.double().abs().amax(-1)
    # A scale in bfloat16 is off by 2^-9 of itself, and so is a result in a 16-bit dtype.
    assert (error <= (STEPS[kv_dtype] / 2 + 2.0**-8) * largest).all()
    assert error.max() > STEPS[kv_dtype] / 8 * largest.min()  # and some do move


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_vector_is_rounded_alone_whatever_stands_beside_it(kv_dtype: str):
    x = draw(3, 2, 5, 16) * torch.logspace(-6, 6, 5)[:, None]
    assert torch.equal(quantized(x, kv_dtype)[1, :, 3], quantized(x[1, :, 3], kv_dtype))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_products_with_the_scale_are_exact_in_float32(kv_dtype: str):
    codes, scales = quantize(draw(50, 32), kv_dtype)
    exact = dequantize(codes, scales, kv_dtype, torch.float64)
    scale = scales[..., :1].double()
    numbers = (exact - (scales[..., 1:].double() if kv_dtype == "int4" else 0)) / scale
    if kv_dtype == "fp8":
        assert torch.equal(numbers, numbers.float().to(torch.float8_e4m3fn).double())
    if kv_dtype == "int8":
        assert torch.equal(numbers, numbers.round())


@pytest.mark.parametrize("value", [0.0, 3.0, -2.5e-30])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_vector_of_equal_numbers_stays_finite(kv_dtype: str, value: float):
    x = torch.full((8,), value)
    torch.testing.assert_close(quantized(x, kv_dtype), x, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_number_that_is_not_finite_shows(kv_dtype: str, bad: float):
    x = torch.ones(2, 8)
    x[0, 3] = bad
    assert not quantized(x, kv_dtype)[0].isfinite().all()
    assert quantized(x, kv_dtype)[1].isfinite().all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_gradients_go_straight_through(kv_dtype: str):
    x = draw(4, 8).requires_grad_()
    weight = draw(4, 8)
    (quantized(x, kv_dtype) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("dim", [64, 20])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_record_gives_the_codes_back_after_float_error(kv_dtype: str, dim: int):
    x = draw(500, dim)
    codes, scales = quantize(x, kv_dtype)
    record = record_of(codes, scales, kv_dtype)
    assert record.shape[-1] == record_bytes(dim, kv_dtype)
    expected = dequantize(codes, scales, kv_dtype, torch.float32)
    assert torch.equal(quantized(x, kv_dtype, record), expected)
    moved = x + 1e-6 * draw(dim, 500).T
    assert torch.equal(quantized(moved, kv_dtype, record), expected)
    assert not torch.equal(quantized(x, kv_dtype, record.roll(1, dims=0)), expected)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_the_record_bears_errors_below_its_share_of_a_step(kv_dtype: str):
    x = draw(500, 64)
    codes, scales = quantize(x, kv_dtype)
    step = scales[..., :1].float()
    expected = dequantize(codes, scales, kv_dtype, torch.float32)
    for share, is_right in ((0.99 * NEAR_MIDDLE, True), (1.5 * NEAR_MIDDLE, False)):
        moved = x + share * step * draw(64, 500).T.sign()
        found = quantized(moved, kv_dtype, record_of(codes, scales, kv_dtype))
        assert torch.equal(found, expected) == is_right
        assert not torch.equal(quantized(moved, kv_dtype), expected)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_record_keeps_the_error_of_other_weights_small(kv_dtype: str):
    x = draw(500, 64)
    codes, scales = quantize(x, kv_dtype)
    step = scales[..., :1].float() * (1 if kv_dtype != "fp8" else 32)  # the largest of fp8
    other = x + step * draw(64, 500).T.clamp(-1, 1)
    error = quantized(other, kv_dtype, record_of(codes, scales, kv_dtype)) - other
    alone = quantized(other, kv_dtype) - other
    assert 1 < error.norm() / alone.norm() < 1.5  # 2 if the bit decided for all numbers


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_bytes_are_those_of_codes_and_scales(kv_dtype: str):
    codes, scales = quantize(draw(1, 64), kv_dtype)
    assert codes.nbytes + scales.nbytes == quantized_bytes(64, kv_dtype, torch.bfloat16)
    assert quantized_bytes(64, None, torch.bfloat16) == 128


def test_an_odd_number_of_dimensions_is_refused_in_four_bits():
    with pytest.raises(ValueError, match=r"cache\.dtype=int4 .* heads have 7 dimensions; use int8 or fp8"):
        quantize(draw(7), "int4")
    assert quantized(draw(7), "int8").shape == (7,)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_vector_of_other_weights_is_rounded_by_itself(kv_dtype: str):
    x = draw(200, 64)
    record = record_of(*quantize(x, kv_dtype), kv_dtype)
    assert torch.equal(quantized(1.5 * x, kv_dtype, record), quantized(1.5 * x, kv_dtype))
