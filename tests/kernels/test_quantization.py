import math

import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.quantization import (
    KV_DTYPES,
    NEAR_MIDDLE,
    SAME_ZERO,
    dequantize,
    group_of,
    nearest_scales,
    quantize,
    quantized,
    quantized_bytes,
    record_bytes,
    record_of,
    turned,
)

GROUPS = (1, 16, 64)
STEPS: dict[str, float] = {"int8": 1 / 127, "fp8": 2.0**-3, "int4": 2 / 15}
"""Distance of neighbouring numbers at most, relative to the largest one of a vector, turned with int4."""


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
    # turned it is -5, 10, 0.4, 4: zero = -5, scale = (10 + 5) / 15 = 1; codes are 5 more, and 5.4 rounds to 5
    codes, scales = quantize(torch.tensor([4.7, -9.3, 0.3, -5.7]), "int4")
    assert codes.tolist() == [0 | 5 << 4, 15 | 9 << 4]  # number j with number j + 2
    assert scales.tolist() == [1.0, -5.0]
    # half of the sums of -5, 10, 0, 4 with the signs ++++, +-+-, ++--, +--+
    assert dequantize(codes, scales, "int4", torch.float32).tolist() == [4.5, -9.5, 0.5, -5.5]


@pytest.mark.parametrize("dim", [2, 20, 64, 80, 96])
def test_turning_is_hadamards_matrix_in_each_block_and_its_own_inverse(dim: int):
    x, block = draw(5, dim), dim & -dim
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    expected = (x.view(5, -1, block) @ matrix / block**0.5).view_as(x)
    torch.testing.assert_close(turned(x), expected)
    torch.testing.assert_close(turned(turned(x)), x)


def test_numbers_in_groups_of_32_have_scales_of_their_own():
    for dim, sizes in ((64, [32, 32]), (80, [32, 32, 16])):
        factors = torch.cat([torch.full((n,), 10.0**i) for i, n in enumerate(sizes)])
        y = factors * draw(50, dim)
        codes, scales = quantize(turned(y), "int4")
        assert scales.shape[-1] == 2 * len(sizes)
        error = turned(dequantize(codes, scales, "int4", torch.float32)) - y
        largest = torch.stack([part.abs().amax(-1) for part in (error / factors).split(sizes, dim=-1)])
        assert (largest < 0.3).all()
        assert (largest > 0.05).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_no_number_moves_further_than_half_a_step(kv_dtype: str, dtype: torch.dtype):
    x = draw(200, 64, dtype=dtype)
    moves = quantized(x, kv_dtype).float() - x.float()
    numbers, moves = (turned(x), turned(moves)) if kv_dtype == "int4" else (x.float(), moves)
    error, largest = moves.double().abs().amax(-1), numbers.double().abs().amax(-1)
    # A scale in bfloat16 is off by 2^-9 of itself, and so is a result in a 16-bit dtype.
    assert (error <= (STEPS[kv_dtype] / 2 + 2.0**-8) * largest).all()
    assert error.max() > STEPS[kv_dtype] / 8 * largest.min()  # and some do move


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_vector_is_rounded_alone_whatever_stands_beside_it(kv_dtype: str):
    x = draw(3, 2, 5, 16) * torch.logspace(-6, 6, 5)[:, None]
    assert torch.equal(quantized(x, kv_dtype)[1, :, 3], quantized(x[1, :, 3], kv_dtype))


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_products_with_the_scale_are_exact_in_float32(kv_dtype: str):
    codes, scales = quantize(draw(50, 32), kv_dtype)
    numbers = dequantize(codes, scales, kv_dtype, torch.float64) / scales.double()
    if kv_dtype == "fp8":
        assert torch.equal(numbers, numbers.float().to(torch.float8_e4m3fn).double())
    else:
        assert torch.equal(numbers, numbers.round())


@pytest.mark.parametrize("value", [0.0, 3.0, -2.5e-30])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_vector_of_equal_numbers_stays_finite(kv_dtype: str, value: float):
    x = torch.full((8,), value)
    torch.testing.assert_close(quantized(x, kv_dtype), x, rtol=2.0**-5, atol=0)


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


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dim", [128, 80, 20])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_record_gives_the_codes_back_after_float_error(kv_dtype: str, dim: int, group: int):
    x = draw(500, dim)
    x = x.where(x.abs() > 0.1, x.sign())  # the steps of fp8 near 0 are below float error
    codes, scales = quantize(x, kv_dtype)
    record = record_of(codes, scales, kv_dtype, group)
    assert record.shape[-1] == record_bytes(dim, kv_dtype, group)
    expected = dequantize(codes, scales, kv_dtype, torch.float32)
    assert torch.equal(quantized(x, kv_dtype, record, group), expected)
    moved = x + 1e-5 * draw(dim, 500).T
    assert torch.equal(quantized(moved, kv_dtype, record, group), expected)
    assert not torch.equal(quantized(moved, kv_dtype), expected)
    assert not torch.equal(quantized(moved, kv_dtype, record.roll(1, dims=0), group), expected)


def near_middle(generator: torch.Generator, flips: list[int], depth: float) -> tuple[Tensor, Tensor]:
    """Numbers of the sampler and the learner of a vector of 64 in int8, with scale 1.

    They are a quarter of a step from a middle, but those that flip, which are `depth` from it on either side.
    """
    codes = torch.randint(-99, 99, (64,), generator=generator).float()
    learner = codes + 0.26
    learner[flips] = codes[flips] + 0.5 - depth
    sampler = learner.clone()
    sampler[flips] = codes[flips] + 0.5 + depth
    for x in (sampler, learner):
        x[0] = 127.0
    return sampler, learner


def corrected(sampler: Tensor, learner: Tensor, group: int) -> Tensor:
    return quantized(learner, "int8", record_of(*quantize(sampler, "int8"), "int8", group), group)


@pytest.mark.parametrize("group", GROUPS)
def test_every_single_flip_and_every_pair_is_corrected(group: int):
    generator = torch.Generator().manual_seed(0)
    flips = [[i] for i in range(1, 64)] + [[i, j] for i in range(1, 64) for j in range(1, i)]
    cases = [near_middle(generator, each, 0.01) for each in flips]
    sampler, learner = (torch.stack(each) for each in zip(*cases, strict=True))
    expected = quantized(sampler, "int8")
    assert (quantized(learner, "int8") != expected).sum(-1).tolist() == [len(each) for each in flips]
    assert torch.equal(corrected(sampler, learner, group), expected)


def test_three_flips_of_a_group_are_corrected_if_one_is_the_nearest_and_four_are_not():
    # 3 ^ 17 ^ 40 ^ 41 = 19: taken for two flips, one of the four and its partner by 19, such as 3 and 16
    for flips, n_wrong in (([3, 17, 40], 0), ([3, 17, 40, 41], 3 + 1)):
        sampler, learner = near_middle(torch.Generator().manual_seed(0), flips, 0.01)
        found = (corrected(sampler, learner, 64) != quantized(sampler, "int8")).sum()
        assert found == n_wrong


def test_check_bits_that_no_near_number_explains_change_nothing():
    sampler, learner = near_middle(torch.Generator().manual_seed(0), [5], 0.01)
    far = learner.where(torch.arange(64) == 0, learner.round() + 0.1)
    assert torch.equal(corrected(sampler, far, 64), quantized(far, "int8"))
    assert not torch.equal(corrected(sampler, far, 64), quantized(sampler, "int8"))


def test_the_largest_number_of_fp8_has_no_other_code_and_explains_nothing():
    # scale 1: steps of 8 at 104 and of 1 at 12; number 5 flips, though 0, 8 and 13 = 0 ^ 5 ^ 8 are nearer
    learner = torch.full((64,), 104.0)
    learner[[0, 5, 8, 13]] = torch.tensor([448.0, 104 + 2.5, 12.4, 12.4])
    sampler = learner.clone()
    sampler[5] = 104 + 5.5
    record = record_of(*quantize(sampler, "fp8"), "fp8", 64)
    assert torch.equal(quantized(learner, "fp8", record, 64), quantized(sampler, "fp8"))
    assert not torch.equal(quantized(learner, "fp8"), quantized(sampler, "fp8"))


@pytest.mark.parametrize("n_flipped", range(1, 9))
def test_a_wrong_check_bit_gives_wrong_codes(n_flipped: int):
    x = draw(500, 64)
    record = record_of(*quantize(x, "int8"), "int8", 64)
    record[:, 0] ^= n_flipped
    assert (quantized(x, "int8", record, 64) != quantized(x, "int8")).any(-1).float().mean() > 0.9


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_scales_come_back_from_their_low_bytes(kv_dtype: str):
    codes, scales = quantize(draw(500, 64) * torch.logspace(-20, 20, 500)[:, None], kv_dtype)
    record = record_of(codes, scales, kv_dtype, 64)
    n_bits, low = 8, record[:, -1:]
    if kv_dtype == "int4":
        n_bits, low = 4, torch.cat([record[:, -2:] & 15, record[:, -2:] >> 4], dim=-1)
    most = 100 if n_bits == 8 else 7
    ulps = torch.tensor([-most, -3, 0, 3, most])[:, None, None]
    own = (scales.view(torch.int16) + ulps).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(nearest_scales(low, own, n_bits), scales.expand_as(own))
    zeros = torch.zeros(1, dtype=torch.bfloat16)
    assert nearest_scales(torch.tensor([255], dtype=torch.uint8), zeros).isfinite().all()


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_the_record_bears_errors_below_its_share_of_a_step(kv_dtype: str):
    x = draw(500, 64)
    codes, scales = quantize(x, kv_dtype)
    step = scales[..., : scales.shape[-1] // 2 or 1].float()
    step = step.repeat_interleave(64 // step.shape[-1], dim=-1)
    expected = dequantize(codes, scales, kv_dtype, torch.float32)
    most = 0.99 * NEAR_MIDDLE if kv_dtype == "int8" else 0.3 * SAME_ZERO
    for share, is_right in ((most, True), (1.5 * NEAR_MIDDLE, False)):
        move = share * step * draw(64, 500).T.sign()
        moved = x + (turned(move) if kv_dtype == "int4" else move)
        found = quantized(moved, kv_dtype, record_of(codes, scales, kv_dtype, 1), 1)
        assert torch.equal(found, expected) == is_right
        assert not torch.equal(quantized(moved, kv_dtype), expected)


def test_sixteen_codes_of_4_bits_bear_the_error_of_16_bit():
    x = draw(2000, 128)
    codes, scales = quantize(x, "int4")
    expected = dequantize(codes, scales, "int4", torch.float32)
    moved = x + 0.03 * scales[..., :1].float() * draw(128, 2000).T  # as large, turned or not
    records = [record_of(codes, scales, "int4", group) for group in (16, 64)]
    found = [quantized(moved, "int4", record, group) for record, group in zip(records, (16, 64), strict=True)]
    wrong = [turned(each - expected).abs() > 1e-3 for each in (*found, quantized(moved, "int4"))]
    *by_group, alone = (each.float().mean() for each in wrong)
    assert 10 * by_group[0] < by_group[1] < 0.1 * alone  # 4 of 64 numbers flip, 1 of 16


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_record_keeps_the_error_of_other_weights_small(kv_dtype: str, group: int):
    x = draw(500, 64)
    codes, scales = quantize(x, kv_dtype)
    step = scales[..., :1].float() * (1 if kv_dtype != "fp8" else 32)  # the largest of fp8
    other = x + step * draw(64, 500).T.clamp(-1, 1)
    error = quantized(other, kv_dtype, record_of(codes, scales, kv_dtype, group), group) - other
    alone = quantized(other, kv_dtype) - other
    assert 1 < error.norm() / alone.norm() < 1.5  # 2 if the bit decided for all numbers


def test_the_bytes_of_a_record_match_hand_arithmetic():
    # 128 bits; 8 groups with 5 check bits; 2 with 7; beside a byte of the scale, or of each of 4 groups
    assert [record_bytes(128, "int8", group) for group in GROUPS] == [17, 6, 3]
    assert [record_bytes(128, "int4", group) for group in GROUPS] == [20, 9, 6]
    kinds = torch.float32, torch.bfloat16
    assert [[group_of(each, dtype) for each in KV_DTYPES] for dtype in kinds] == [[64] * 3, [1, 1, 16]]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_bytes_are_those_of_codes_and_scales(kv_dtype: str):
    for dim in (64, 80):
        codes, scales = quantize(draw(1, dim), kv_dtype)
        assert codes.nbytes + scales.nbytes == quantized_bytes(dim, kv_dtype, torch.bfloat16)
    assert [quantized_bytes(64, each, torch.bfloat16) for each in (None, "int8", "int4")] == [128, 66, 40]


def test_an_odd_number_of_dimensions_is_refused_in_four_bits():
    with pytest.raises(ValueError, match=r"cache\.dtype=int4 .* heads have 7 dimensions; use int8 or fp8"):
        quantize(draw(7), "int4")
    assert quantized(draw(7), "int8").shape == (7,)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_vector_of_other_weights_is_rounded_by_itself(kv_dtype: str, group: int):
    x = draw(200, 128)
    record = record_of(*quantize(x, kv_dtype), kv_dtype, group)
    is_own = (quantized(1.5 * x, kv_dtype, record, group) == quantized(1.5 * x, kv_dtype)).all(-1)
    # 4 bits of a scale fit one of other weights by chance
    assert is_own.float().mean() >= (0.97 if kv_dtype == "int4" else 1.0)
