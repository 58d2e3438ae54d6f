import math
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.backend import is_interpreted
from lit_rlkv.kernels.decode_attention import decode_attention, kernel, launch
from lit_rlkv.kernels.device import Device, assume_device
from lit_rlkv.kernels.quantization import KV_DTYPES, dequantize, quantize
from tests.kernels.accuracy import bound, excess_error
from tests.tiers import slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALING = 0.25
TWO_SPLITS = "triton, 2 splits"
"""Runs in the long tier only: 3 splits take the same branches, and padding too."""
KERNELS: dict[str, Callable[..., Tensor]] = {
    "triton": partial(kernel.decode_attention, n_splits=1),
    TWO_SPLITS: partial(kernel.decode_attention, n_splits=2),
    "triton, 3 splits": partial(kernel.decode_attention, n_splits=3),
}
IMPLEMENTATIONS = {"reference": partial(decode_attention, kernels="reference"), **KERNELS}


class Shape(NamedTuple):
    n_slots: int
    group: int
    batch: int = 3
    kv_heads: int = 2
    dim: int = 16
    dim_v: int = 8


class Inputs(NamedTuple):
    query: Tensor
    keys: Tensor
    values: Tensor
    n_live: Tensor


TOY = Shape(63, 4)
SHAPES = [
    *(Shape(1, 4), Shape(17, 2), Shape(33, 7), TOY, Shape(130, 1)),
    *(Shape(33, 20, batch=2, kv_heads=1), Shape(33, 2, dim=24, dim_v=40)),
]
SHORT = {(2, torch.float16), (6, torch.float32)}
"""Shapes and precisions of the short tier: an odd group in several blocks, and dims that need padding."""
ACCURACY_CASES = [
    pytest.param(shape, dtype, marks=[] if (i, dtype) in SHORT else pytest.mark.slow)
    for i, shape in enumerate(SHAPES)
    for dtype in (torch.float32, torch.float16)
]
REAL_SHAPES = [
    Shape(2048, 4, batch=64, kv_heads=8, dim=128, dim_v=128),
    Shape(8192, 4, batch=64, kv_heads=8, dim=128, dim_v=128),
    Shape(8192, 5, batch=2, kv_heads=4, dim=128, dim_v=128),
    *(Shape(1000, 7, batch=5, kv_heads=2, dim=dim, dim_v=dim) for dim in (64, 80, 96, 256)),
]


@pytest.fixture(autouse=True)
def _poisoned_and_cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of `torch.empty` is NaN; toy shapes fill several blocks of slots, 16 or 32 each."""

    def poisoned(*size: int | tuple[int, ...], **options) -> Tensor:
        return torch.full(size[0] if isinstance(size[0], tuple) else size, torch.nan, **options)

    monkeypatch.setattr(torch, "empty", poisoned)
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "BLOCK_BYTES", 1024)


def make_inputs(shape: Shape, dtype: torch.dtype) -> Inputs:
    """Rows have filled all slots, half and one, in turn; unused keys are NaN or huge, unused values huge."""
    generator = torch.Generator(DEVICE).manual_seed(shape.n_slots)
    draw = partial(torch.randn, generator=generator, device=DEVICE)
    pools = (shape.batch, shape.kv_heads, shape.n_slots)
    query = 3 * draw(shape.batch, shape.kv_heads, shape.group, shape.dim)
    keys, values = draw(*pools, shape.dim), draw(*pools, shape.dim_v)
    n_live = torch.tensor([shape.n_slots, (shape.n_slots + 1) // 2, 1]).repeat(shape.batch)[: shape.batch]
    n_live = n_live.int().to(DEVICE)
    slot = torch.arange(shape.n_slots, device=DEVICE)
    is_dead = (slot >= n_live[:, None])[:, None, :, None]
    junk = torch.where(slot % 2 == 0, torch.nan, 1e4)[:, None]
    keys, values = torch.where(is_dead, junk, keys), torch.where(is_dead, 1e4, values)
    return Inputs(query.to(dtype), keys.to(dtype), values.to(dtype), n_live)


def written_out(inputs: Inputs, dtype: torch.dtype, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """Return output and received attention in plain arithmetic of `dtype`, one row and KV head at a time."""
    query, keys, values, n_live = inputs
    out = torch.zeros(*query.shape[:3], values.shape[3], dtype=dtype, device=DEVICE)
    received = torch.zeros(keys.shape[:3], dtype=dtype, device=DEVICE)
    for b, n in enumerate(n_live.tolist()):
        for h in range(keys.shape[1]):
            logits = query[b, h].to(dtype) @ keys[b, h, :n].to(dtype).T * SCALING
            if softcap is not None:
                logits = softcap * (logits / softcap).tanh()
            probs = logits.softmax(-1)
            out[b, h] = probs @ values[b, h, :n].to(dtype)
            received[b, h, :n] = probs.mean(dim=0)
    return out, received


def excess_errors(
    attend: Callable[..., Tensor], inputs: Inputs, softcap: float | None = None
) -> tuple[float, float]:
    """Return the errors of output and received attention, in units of plain PyTorch's error."""
    received = torch.full(inputs.keys.shape[:3], torch.nan, device=DEVICE)
    out = attend(*inputs, SCALING, softcap=softcap, received=received)
    plain = written_out(inputs, inputs.query.dtype, softcap)
    truth = written_out(inputs, torch.float64, softcap)
    return excess_error(out, plain[0], truth[0]), excess_error(received, plain[1], truth[1])


@pytest.fixture(params=[slow(name) if name == TWO_SPLITS else name for name in IMPLEMENTATIONS])
def attend(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(params=[slow(name) if name == TWO_SPLITS else name for name in KERNELS])
def kernel_call(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    return KERNELS[request.param]


@pytest.mark.parametrize(("shape", "dtype"), ACCURACY_CASES, ids=str)
def test_output_and_received_are_as_accurate_as_plain_torch(attend, shape: Shape, dtype: torch.dtype):
    assert max(excess_errors(attend, make_inputs(shape, dtype))) <= bound(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_real_sizes_are_as_accurate_as_plain_torch(shape: Shape, dtype: torch.dtype):
    inputs = make_inputs(shape, dtype)
    assert max(excess_errors(partial(decode_attention, kernels="triton"), inputs)) <= bound(dtype)


def test_the_kernels_never_read_an_unused_slot(kernel_call):
    inputs = make_inputs(TOY, torch.float32)
    dead = torch.arange(TOY.n_slots, device=DEVICE) >= inputs.n_live[:, None]
    poisoned = inputs._replace(values=inputs.values.masked_fill(dead[:, None, :, None], torch.nan))
    assert torch.equal(kernel_call(*poisoned, SCALING), kernel_call(*inputs, SCALING))


def test_a_softcapped_call_is_as_accurate_as_plain_torch(attend):
    assert max(excess_errors(attend, make_inputs(TOY, torch.float32), softcap=2.0)) <= bound(torch.float32)


def one_slot_more(query, keys, values, n_live, *args, **kwargs) -> Tensor:
    keys, values = keys.nan_to_num(1.0), values.nan_to_num(1.0)
    return decode_attention(query, keys, values, n_live + 1, *args, **kwargs)


def one_slot_less(query, keys, values, n_live, *args, **kwargs) -> Tensor:
    return decode_attention(query, keys, values, n_live - 1, *args, **kwargs)


def swapped_kv_heads(query, *args, **kwargs) -> Tensor:
    return decode_attention(query.flip(1), *args, **kwargs)


def shifted_slots(query, keys, *args, received, **kwargs) -> Tensor:
    out = decode_attention(query, keys, *args, received=received, **kwargs)
    received.copy_(received.roll(1, dims=2))
    return out.roll(1, dims=2)


@pytest.mark.parametrize("wrong", [one_slot_more, one_slot_less, swapped_kv_heads, shifted_slots])
def test_the_comparison_catches(wrong):
    assert min(excess_errors(wrong, make_inputs(TOY, torch.float32))) > 100.0


def test_the_comparison_catches_a_forgotten_softcap():
    def forgets(*args, softcap, **kwargs) -> Tensor:
        return decode_attention(*args, **kwargs)

    assert min(excess_errors(forgets, make_inputs(TOY, torch.float32), softcap=2.0)) > 100.0


def make_hand_example() -> tuple[Inputs, Tensor]:
    """One row and KV head, two query heads, two live slots and a dead one; and a running score."""
    query = torch.tensor([[0.0, math.log(3.0)], [5.0, 0.0]])[None, None]
    keys = torch.tensor([[0.0, 1.0], [0.0, 2.0], [torch.nan, 9.0]])[None, None]
    values = torch.tensor([[1.0], [5.0], [9.0]])[None, None]
    tensors = (tensor.to(DEVICE) for tensor in (query, keys, values, torch.tensor([2])))
    return Inputs(*tensors), torch.tensor([[[5.0, 7.0, 9.0]]], device=DEVICE)


def test_received_matches_hand_arithmetic(attend):
    # Logits are [ln 3, 2 ln 3] and [0, 0], probabilities [1/4, 3/4] and [1/2, 1/2], their mean [3/8, 5/8].
    inputs, received = make_hand_example()
    out = attend(*inputs, 1.0, received=received)
    torch.testing.assert_close(received.cpu(), torch.tensor([[[3 / 8, 5 / 8, 0.0]]]))
    # 1/4 + 15/4 and 1/2 + 5/2
    torch.testing.assert_close(out.cpu(), torch.tensor([[[[4.0], [3.0]]]]))


def test_accumulated_scores_match_hand_arithmetic(attend):
    # Slot 0 goes on from 5. Slot 1 is the newest key's, and the 7 was another's. Slot 2 is dead.
    inputs, received = make_hand_example()
    attend(*inputs, 1.0, received=received, accumulates=True)
    torch.testing.assert_close(received.cpu(), torch.tensor([[[5 + 3 / 8, 5 / 8, 9.0]]]))


def test_softcap_matches_hand_arithmetic(attend):
    # The first head's logits -1e4 and 1e4 saturate at -c and c; with c = ln(3)/2 they differ by ln 3.
    (query, keys, values, n_live), received = make_hand_example()
    keys[..., 0, 1], keys[..., 1, 1] = -1e4, 1e4
    attend(query, keys, values, n_live, 1.0, softcap=math.log(3.0) / 2, received=received)
    torch.testing.assert_close(received.cpu(), torch.tensor([[[3 / 8, 5 / 8, 0.0]]]))


def running_scores(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return earlier scores, with NaN in the newest and unused slots, and a mask of the older slots."""
    slot = torch.arange(inputs.keys.shape[2], device=DEVICE)
    is_older = (slot < inputs.n_live[:, None] - 1)[:, None].expand(inputs.keys.shape[:3])
    before = torch.rand(inputs.keys.shape[:3], generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return before.masked_fill(~is_older, torch.nan), is_older


def accumulation_error(attend: Callable[..., Tensor], inputs: Inputs) -> float:
    """Return the error over live slots, in units of plain PyTorch's error."""
    scores, is_older = running_scores(inputs)
    before = scores.masked_fill(~is_older, 0.0)
    attend(*inputs, SCALING, received=scores, accumulates=True)
    is_live = torch.arange(scores.shape[2], device=DEVICE) < inputs.n_live[:, None]
    plain, truth = (
        before.to(dtype) + written_out(inputs, dtype)[1] for dtype in (torch.float32, torch.float64)
    )
    chosen = is_live[:, None].expand_as(scores)
    return excess_error(scores[chosen], plain[chosen], truth[chosen])


@pytest.mark.parametrize("shape", [Shape(1, 1), TOY, slow(Shape(130, 2))], ids=str)
def test_accumulated_scores_start_afresh_for_the_newest_key(attend, shape: Shape):
    assert accumulation_error(attend, make_inputs(shape, torch.float32)) <= bound(torch.float32)


def test_the_comparison_catches_scores_that_do_not_start_afresh():
    def forgets(*args, received, accumulates) -> Tensor:
        share = torch.zeros_like(received)
        out = decode_attention(*args, received=share)
        received.nan_to_num_(1.0).add_(share)
        return out

    assert accumulation_error(forgets, make_inputs(TOY, torch.float32)) > 100.0


def test_accumulation_leaves_unused_slots_unchanged(attend):
    inputs = make_inputs(TOY, torch.float32)
    scores, _ = running_scores(inputs)
    attend(*inputs, SCALING, received=scores, accumulates=True)
    is_dead = torch.arange(TOY.n_slots, device=DEVICE) >= inputs.n_live[:, None]
    assert torch.equal(scores.isnan(), is_dead[:, None].expand_as(scores))


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_row_without_a_key_gives_zero(attend, accumulates: bool):
    query, keys, values, _ = make_inputs(TOY, torch.float32)
    n_live = torch.tensor([0, 5, 0], device=DEVICE)
    received = torch.ones(keys.shape[:3], device=DEVICE)
    out = attend(query, keys, values, n_live, SCALING, received=received, accumulates=accumulates)
    assert (out[::2] == 0).all()
    assert (received[::2] == (1.0 if accumulates else 0.0)).all()
    assert (out[1] != 0).all()


def test_the_output_has_the_same_bits_whether_or_not_scores_are_wanted_and_again(attend):
    inputs = make_inputs(TOY, torch.float16)
    buffers = [torch.ones(inputs.keys.shape[:3], device=DEVICE) for _ in range(3)]
    alone = attend(*inputs, SCALING)
    for received, accumulates in zip(buffers, (True, True, False), strict=True):
        assert torch.equal(attend(*inputs, SCALING, received=received, accumulates=accumulates), alone)
    assert torch.equal(buffers[0], buffers[1])


def test_layout_in_memory_does_not_matter_to_the_kernel(kernel_call):
    inputs, received = make_inputs(TOY, torch.float16), torch.ones(3, 2, 63, device=DEVICE)
    expected = kernel_call(*inputs, SCALING, received=received)
    query, keys, values = (misaligned(tensor.transpose(1, 2)).transpose(1, 2) for tensor in inputs[:3])
    n_live = torch.stack([inputs.n_live.long(), torch.full((3,), 99, device=DEVICE)], dim=1)[:, 0]
    wide = torch.full((2, 3, 80), torch.nan, device=DEVICE)
    actual = kernel_call(query, keys, values, n_live, SCALING, received=wide[..., 1:64].transpose(0, 1))
    assert torch.equal(actual, expected)
    # On a GPU the order in which heads are averaged may depend on how the buffer lies.
    torch.testing.assert_close(wide[..., 1:64].transpose(0, 1), received, rtol=1e-6, atol=0.0)
    assert wide[..., :1].isnan().all()
    assert wide[..., 64:].isnan().all()


def misaligned(tensor: Tensor) -> Tensor:
    """The same numbers, one element past where an allocation begins."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def test_the_kernel_reads_tensors_right_whose_last_dimension_is_strided(kernel_call):
    inputs = make_inputs(TOY, torch.float32)
    strided = (tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in inputs[:3])
    assert torch.equal(kernel_call(*strided, inputs.n_live, SCALING), kernel_call(*inputs, SCALING))


def test_slots_are_split_only_where_programs_are_few_and_slots_many():
    # 64 rows of 8 KV heads are 512 programs, 3.9 for each of 132 multiprocessors.
    assert launch.choose_n_splits(512, 8192, 132) == 1
    # 32 programs; 4 x 132 = 528 wanted, so 17 splits of each, of which 16 are a power of two.
    assert launch.choose_n_splits(32, 8192, 132) == 16
    # 2048 slots are 8 times 256, the fewest that a split is worth.
    assert launch.choose_n_splits(32, 2048, 132) == 8
    assert launch.choose_n_splits(1, 100, 132) == 1


@pytest.mark.parametrize("n_splits", [slow(1), 3, slow(4)])
def test_with_a_fixed_number_of_splits_a_row_is_the_same_in_any_batch(n_splits, monkeypatch):
    # Slots of a toy are as many blocks, and worth as many splits, as the slots of a real pool.
    monkeypatch.setattr(launch, "MIN_SPLIT_SLOTS", 16)
    monkeypatch.setattr(launch, "BLOCK_BYTES", 512)
    inputs = make_inputs(Shape(130, 4, batch=6), torch.float16)
    alone = [Inputs(*(tensor[i : i + 1] for tensor in inputs)) for i in range(6)]

    def rows(**options) -> tuple[Tensor, Tensor]:
        together = decode_attention(*inputs, SCALING, kernels="triton", **options)
        return together, torch.cat(
            [decode_attention(*row, SCALING, kernels="triton", **options) for row in alone]
        )

    assert torch.equal(*rows(n_splits=n_splits))
    if DEVICE == "cpu":
        # By default one row is split more than six where multiprocessors are few, and rounds otherwise.
        with assume_device(Device(n_multiprocessors=4, shared_bytes=167_936)):
            assert launch.plan(*inputs[:3]).n_splits == 1
            assert launch.plan(*alone[0][:3]).n_splits == 8
            assert not torch.equal(*rows())


def test_blocks_stay_within_registers_where_heads_are_narrow_or_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "BLOCK_BYTES", 16_384)

    def block(group: int, dim: int) -> int:
        pool = torch.zeros(1, 1, 1, dim, dtype=torch.float16)
        return launch.plan(pool.expand(-1, -1, group, -1), pool, pool).block

    # 16 KiB of keys are 64 slots of 256 bytes, 128 of 128, and would be 512 of 32 bytes.
    assert [block(4, dim) for dim in (128, 64, 16)] == [64, 128, 128]
    # 64 heads in 4 warps: 4 x 1024 / 64 = 64 slots. 128 heads have 8 warps.
    assert [block(group, 64) for group in (32, 64, 128)] == [128, 64, 64]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [REAL_SHAPES[0], REAL_SHAPES[2]], ids=str)
def test_a_captured_call_follows_what_its_inputs_hold_at_replay(shape: Shape):
    inputs = make_inputs(shape, torch.bfloat16)
    scores = torch.zeros(inputs.keys.shape[:3], device=DEVICE)
    call = partial(decode_attention, *inputs, SCALING, received=scores, accumulates=True, kernels="triton")
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    inputs.n_live.fill_(1)
    scores.fill_(3.0)
    graph.replay()
    assert torch.equal(captured, call())
    assert (scores[..., 0] == 1.0).all()
    assert (scores[..., 1:] == 3.0).all()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def _each_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs in Triton's interpreter and, where there is one, on a GPU."""
    if request.param == "cpu" and not is_interpreted():
        pytest.skip("where there is a GPU kernels are not interpreted")
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", request.param)


def coded(inputs: Inputs, kv_dtype: str) -> tuple[Inputs, list[Tensor]]:
    """Return the inputs with codes in place of keys and values, and their scales; unused ones are junk."""
    dead = torch.arange(inputs.keys.shape[2], device=DEVICE) >= inputs.n_live[:, None]
    pools = [quantize(pool.nan_to_num(), kv_dtype) for pool in (inputs.keys, inputs.values)]
    codes = [pool.masked_fill(dead[:, None, :, None], 129) for pool, _ in pools]
    scales = [scale.masked_fill(dead[:, None, :, None], 1e4) for _, scale in pools]
    return inputs._replace(keys=codes[0], values=codes[1]), scales


@pytest.mark.usefixtures("_each_device")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (TOY, torch.float32),
        (Shape(33, 2, dim=80, dim_v=96), torch.float16),
        slow(Shape(33, 7), torch.float16),
    ],
    ids=str,
)
def test_codes_give_the_bits_of_the_numbers_that_they_stand_for(
    kernel_call, shape: Shape, dtype: torch.dtype, kv_dtype: str
):
    inputs = make_inputs(shape, dtype)
    codes, scales = coded(inputs, kv_dtype)
    numbers = inputs._replace(
        keys=dequantize(codes.keys, scales[0], kv_dtype, dtype),
        values=dequantize(codes.values, scales[1], kv_dtype, dtype),
    )
    buffers = [torch.full(inputs.keys.shape[:3], torch.nan, device=DEVICE) for _ in range(2)]
    found = kernel_call(*codes, SCALING, received=buffers[0], kv_dtype=kv_dtype, scales=scales)
    expected = kernel_call(*numbers, SCALING, received=buffers[1])
    if kv_dtype == "int4":  # other sums, of turned numbers
        tolerance = {"rtol": 0.0, "atol": 2e-6 if dtype == torch.float32 else 5e-3}
        torch.testing.assert_close(found, expected, **tolerance)
        torch.testing.assert_close(*buffers, **tolerance)
        return
    assert torch.equal(found, expected)
    assert torch.equal(*buffers)


@pytest.mark.usefixtures("_each_device")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_kernel_reads_every_code_as_the_definition_does(kv_dtype: str):
    # One slot for each byte, whose value is read alone: the query of each head points at one key.
    codes = torch.arange(256, device=DEVICE).to(torch.uint8).view(1, 1, 256, 1).repeat(1, 1, 1, 16)
    if kv_dtype == "fp8":  # 127 and 255 are NaN, which no finite vector has
        codes = codes.masked_fill(codes & 127 == 127, 0)
    n_scales = 2 if kv_dtype == "int4" else 1
    scales = torch.full((1, 1, 256, n_scales), 0.75, dtype=torch.bfloat16, device=DEVICE)
    expected = dequantize(codes, scales, kv_dtype, torch.float32)
    for slot in range(0, 256, 1 if DEVICE == "cuda" else 15):
        one, n_live = slice(slot, slot + 1), torch.ones(1, dtype=torch.long, device=DEVICE)
        query = torch.zeros(1, 1, 1, expected.shape[-1], device=DEVICE)
        pools, both = [codes[:, :, one]] * 2, [scales[:, :, one]] * 2
        out = kernel.decode_attention(query, *pools, n_live, 1.0, kv_dtype=kv_dtype, scales=both)
        assert torch.equal(out[0, 0, 0], expected[0, 0, slot])


@pytest.mark.usefixtures("_each_device")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_definition_attends_to_what_codes_stand_for(kv_dtype: str):
    inputs = make_inputs(TOY, torch.float32)
    codes, scales = coded(inputs, kv_dtype)
    numbers = [dequantize(codes[i + 1], scales[i], kv_dtype, torch.float32) for i in range(2)]
    found = decode_attention(*codes, SCALING, kv_dtype=kv_dtype, scales=scales, kernels="reference")
    expected = decode_attention(codes.query, *numbers, codes.n_live, SCALING, kernels="reference")
    assert torch.equal(found, expected)
    wrong = decode_attention(*codes, SCALING, kv_dtype=kv_dtype, scales=scales[::-1], kernels="reference")
    assert (wrong - found).abs().max() > 1e-2
