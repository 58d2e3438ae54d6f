"""Quantization of keys and values: codes of 8 bits with one scale for each vector, or of 4 bits in groups."""

from typing import Any

import torch
from jaxtyping import BFloat16, Float, Float32, UInt8
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LARGEST_CODE = {"int8": 127.0, "fp8": 448.0, "int4": 15.0}
KV_DTYPES = tuple(LARGEST_CODE)
SCALE_DTYPE = torch.bfloat16
"""8 bits of precision: a code times a scale is exact in float32, so that all kernels agree on it bit by bit.
It has the range of float32, and is the same in sampler and learner unless float error crosses one of its
roundings, which happens to a vector more rarely than to one of its codes."""
SCALE_GROUP = 32
"""Numbers of a turned vector that share a scale and a zero point with int4; the last of them may be fewer."""
SAME_SCALE = {"int8": 1 / 64, "fp8": 1 / 16, "int4": 1 / 48}
SAME_ZERO = 0.2
"""A vector counts as the one that was recorded if no scale differs by more than this part of itself, and no
zero point by more than this many steps. A change of each number by half a step of 8 bits stays below. Of 16
scales of int4 in a row one fits the record: those of other weights mostly lie beyond these limits."""
NEAR_MIDDLE = 0.25
"""A recorded bit decides between two neighbouring codes for a number at most this many steps from their
middle. A number of other weights moves by this much more than half a step."""
NO_STEP = 2.0**-5
"""The smallest numbers of fp8 are closer together than float error, and count as near: their check bits would
move others. In units of the scale, so that fp8 alone has such steps."""


def quantize(
    vectors: Float[Tensor, "*lead dim"], kv_dtype: str
) -> tuple[UInt8[Tensor, "*lead byte"], BFloat16[Tensor, "*lead scale"]]:
    """Return the codes of each vector as bytes, and its scale; with int4 its scales, then its zero points.

    int8: round(x / scale), with scale = max |x| / 127
    fp8: x / scale as an e4m3 float, with scale = max |x| / 448
    int4: round((y - zero) / scale), with y = `turned` x, and in each `SCALE_GROUP` of y scale =
    (max y - min y) / 15 and zero = min y; byte j has number j in its lower half and number j + dim/2 in its
    upper one

    Raises:
        ValueError: int4 is to put an odd number of codes in bytes.
    """
    wide, most = vectors.float(), LARGEST_CODE[kv_dtype]
    if kv_dtype == "int4":
        check_dim(vectors.shape[-1], kv_dtype)
        wide = turned(wide)
        last = wide[..., -1:].expand(*wide.shape[:-1], -wide.shape[-1] % SCALE_GROUP)  # changes no extreme
        groups = torch.stack(torch.split(torch.cat([wide, last], dim=-1), SCALE_GROUP, dim=-1), dim=-2)
        least, largest = groups.aminmax(dim=-1)
        zero = least.to(SCALE_DTYPE)
        scale = ((largest - zero) / most).to(SCALE_DTYPE)
        codes = _divided(wide - _of_each(zero, wide), _of_each(scale, wide)).round().clamp(0, most)
        low, high = codes.to(torch.uint8).chunk(2, dim=-1)
        return low | high << 4, torch.cat([scale, zero], dim=-1)
    scale = (wide.abs().amax(-1, keepdim=True) / most).to(SCALE_DTYPE)
    codes = _divided(wide, scale.float())
    if kv_dtype == "int8":
        codes = codes.round()
    codes = codes.clamp(-most, most)
    return codes.to(torch.int8 if kv_dtype == "int8" else torch.float8_e4m3fn).view(torch.uint8), scale


def turned(vectors: Float[Tensor, "*lead dim"]) -> Float32[Tensor, "*lead dim"]:
    """Return each vector under an orthogonal map that is its own inverse: Hadamard's, of the largest blocks.

    It spreads a large number over its block, of the largest power of two that divides dim, so that a scale
    need not span it (QuaRot, arXiv:2404.00456). Products of two vectors stay as they are. By sums and
    differences alone, in one order, so that no matrix product in fewer bits or of another shape comes in.
    """
    dim, wide = vectors.shape[-1], vectors.float()
    block = dim & -dim
    for bit in range(block.bit_length() - 1):
        first, second = wide.reshape(*wide.shape[:-1], dim >> bit + 1, 2, 1 << bit).unbind(-2)
        wide = torch.stack([first + second, first - second], dim=-2).flatten(-3)
    return wide * block**-0.5


def _of_each(scales: Tensor, numbers: Tensor) -> Tensor:
    """Return the scale of each number of vectors in groups, in float32."""
    return scales.float().repeat_interleave(SCALE_GROUP, dim=-1)[..., : numbers.shape[-1]]


def check_dim(dim: int, kv_dtype: str | None) -> None:
    """Check that vectors of so many numbers can be quantized.

    Raises:
        ValueError: int4 is to put an odd number of codes in bytes.
    """
    if kv_dtype == "int4" and dim % 2:
        raise ValueError(
            f"cache.dtype=int4 puts two codes in a byte, and heads have {dim} dimensions; use int8 or fp8"
        )


def _divided(wide: Tensor, scale: Tensor) -> Tensor:
    """Return wide / scale; anything finite where the scale is 0, which the codes are multiplied by."""
    return wide / scale.masked_fill(scale == 0, 1.0)


def dequantize(
    codes: UInt8[Tensor, "*lead byte"],
    scales: BFloat16[Tensor, "*lead scale"],
    kv_dtype: str,
    dtype: torch.dtype,
) -> Float[Tensor, "*lead dim"]:
    """Return code · scale, with int4 `turned` code · scale + zero, in float32 and then in `dtype`."""
    if kv_dtype == "int4":
        each = _each(codes, kv_dtype)
        scale, zero = (_of_each(part, each) for part in scales.chunk(2, dim=-1))
        return turned(each.float() * scale + zero).to(dtype)
    scale = scales.float()
    numbers = codes.view(torch.int8 if kv_dtype == "int8" else torch.float8_e4m3fn).float()
    return (numbers * scale).to(dtype)


def record_of(
    codes: UInt8[Tensor, "*lead byte"],
    scales: BFloat16[Tensor, "*lead scale"],
    kv_dtype: str,
    group: int,
) -> UInt8[Tensor, "*lead record"]:
    """Return what tells the codes of a vector from their neighbours: check bits, and low bits of scales.

    Of a scale 8; with int4 4 of each scale, and of its zero point in the same byte.

    The last bits of each `group` of codes are known up to a few of them to a learner, which has the numbers
    again but for its float error. Of them it is enough to keep the check bits of an extended Hamming code
    (Slepian and Wolf, 10.1109/TIT.1973.1055037). A group of one keeps the bit itself.

    Args:
        group: a power of two, `group_of` the cache.
    """
    bits = _check_bits(_each(codes, kv_dtype) & 1, group).flatten(-2)
    bits = F.pad(bits, (0, -bits.shape[-1] % 8))
    bits = bits.view(*bits.shape[:-1], -1, 8)
    packed = (bits << torch.arange(8, device=bits.device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    low = (scales.view(torch.int16) & 255).to(torch.uint8)
    if kv_dtype == "int4":
        scale, zero = (low & 15).chunk(2, dim=-1)
        low = scale | zero << 4
    return torch.cat([packed, low], dim=-1)


def group_of(kv_dtype: str, dtype: torch.dtype) -> int:
    """Return how many codes share check bits in a cache of numbers of this dtype: as many as replay allows.

    The gap is then about that of a bit for each code (benchmarks/replay_gap.py --part codes). In float32 few
    numbers are rounded otherwise, in 16 bit few of int4; those of int8 and fp8 are off by about half a step.
    """
    if dtype.itemsize > 2:
        return 64
    return 16 if kv_dtype == "int4" else 1


def _check_bits(bits: Tensor, group: int) -> Tensor:
    """Return the parity of each group of bits, and those of the halves by each bit of the position."""
    if group == 1:
        return bits[..., None]
    bits = F.pad(bits, (0, -bits.shape[-1] % group))
    bits = bits.view(*bits.shape[:-1], -1, group)
    place = torch.arange(group, device=bits.device)
    halves = place[:, None] >> torch.arange(group.bit_length() - 1, device=bits.device) & 1
    counts = bits.float() @ F.pad(halves, (1, 0), value=1).float()  # at most 64, exact in 16 bit too
    return counts.to(torch.uint8) & 1


def quantized(
    vectors: Float[Tensor, "*lead dim"],
    kv_dtype: str,
    record: UInt8[Tensor, "*lead record"] | None = None,
    group: int = 1,
) -> Float[Tensor, "*lead dim"]:
    """Return the vectors as a quantized cache gives them back; their gradient goes straight through.

    Args:
        record: `record_of` the sampler's codes. The result is then theirs if the vectors are off by less
            than `NEAR_MIDDLE` steps, and if no group has more than three numbers that are rounded
            otherwise, which must be those nearest to the middle. A group whose check bits nothing of that
            kind explains is rounded without them, to the recorded scale. A vector whose scale is another is
            rounded by itself. None: all are.
        group: that of `record_of`.
    """
    out: Tensor = _Quantized.apply(vectors, kv_dtype, record, group)  # type: ignore[no-untyped-call]
    return out


class _Quantized(torch.autograd.Function):
    """Not x + (r - x).detach(), which is not r in 16 bit."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, kv_dtype: str, record: Tensor | None, group: int) -> Tensor:
        codes, scales = quantize(vectors, kv_dtype)
        own = dequantize(codes, scales, kv_dtype, vectors.dtype)
        return own if record is None else _by_record(vectors, own, scales, kv_dtype, record, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return upstream, None, None, None


def _by_record(
    vectors: Tensor, own: Tensor, own_scales: Tensor, kv_dtype: str, record: Tensor, group: int
) -> Tensor:
    """Return the nearest numbers, or the others where the check bits say so; `own` at another scale."""
    n_low = _low_bytes(vectors.shape[-1], kv_dtype)
    low, wide, least, most = record[..., -n_low:], vectors.float(), 0.0, LARGEST_CODE[kv_dtype]
    if kv_dtype == "int4":
        scales = nearest_scales(torch.cat([low & 15, low >> 4], dim=-1), own_scales, n_bits=4).float()
        scale, zero = (_of_each(part, wide) for part in scales.chunk(2, dim=-1))
        wide = turned(wide) - zero
    else:
        scales = scale = nearest_scales(low, own_scales).float()
        least = -most
    place = _divided(wide, scale).clamp(least, most)
    if kv_dtype == "fp8":
        code = place.to(torch.float8_e4m3fn).view(torch.uint8)
        number = torch.where(code < 128, code.int(), 128 - code.int())  # ordered, of both signs
        nearest = _fp8_values(number)
        other = (number + torch.where(place >= nearest, 1, -1)).clamp(-126, 126)
        step = _fp8_values(other) - nearest  # 0 beyond the last code
        to_middle = step.abs() / 2 - (place - nearest).abs()
        is_near = (to_middle <= NEAR_MIDDLE * step.abs().clamp(min=NO_STEP)) & (step != 0)
    else:
        nearest = place.round()
        code = nearest.to(torch.int8).view(torch.uint8)
        step = torch.where(place >= nearest, 1.0, -1.0)
        to_middle = 0.5 - (place - nearest).abs()
        is_near = to_middle <= NEAR_MIDDLE
    checks = _check_bits(code & 1, group)
    bits = record[..., :-n_low, None] >> torch.arange(8, device=record.device, dtype=torch.uint8) & 1
    checks = checks ^ bits.flatten(-2)[..., : checks.shape[-2:].numel()].view_as(checks)
    if group == 1:
        is_other = is_near & checks[..., 0].bool()
    else:
        is_other = _flipped(to_middle.masked_fill(~is_near, torch.inf), checks)
    values = torch.where(is_other, nearest + step, nearest) * scale
    tolerance = SAME_SCALE[kv_dtype] * scales
    if kv_dtype == "int4":
        values = turned(values + zero)
        size = scales.chunk(2, dim=-1)[0]
        tolerance = torch.cat([SAME_SCALE[kv_dtype] * size, SAME_ZERO * size], dim=-1)
    is_same = ((own_scales.float() - scales).abs() <= tolerance).all(-1, keepdim=True)
    return torch.where(is_same, values.to(vectors.dtype), own)


def _flipped(to_middle: Float[Tensor, "*lead dim"], checks: UInt8[Tensor, "*lead group bit"]) -> Tensor:
    """Return the most likely flips that explain the check bits of each group, True where a code is another.

    An even number of flips is taken for the two that are nearest to the middle together, an odd one for one,
    or for the nearest and two more. It is none if a number of infinite distance would have to flip.
    """
    dim, group = to_middle.shape[-1], 1 << checks.shape[-1] - 1
    cost = F.pad(to_middle, (0, -dim % group), value=torch.inf)
    cost = cost.view(*cost.shape[:-1], -1, group)
    is_odd = checks[..., :1] == 1
    # 32 bits: a position for each number is most of the memory here.
    place = torch.arange(group, device=checks.device, dtype=torch.int32)
    at = (checks[..., 1:].int() << place[: checks.shape[-1] - 1]).sum(-1, True, dtype=torch.int32)
    least, first = cost.min(-1, keepdim=True)
    first = first.int()
    apart = torch.where(is_odd, at ^ first, at)  # of two more, whose positions differ in these bits
    pair, second = (cost + cost.gather(-1, place ^ apart)).min(-1, True)
    second = second.int()
    one, three = cost.gather(-1, at), least + pair
    is_one, total = is_odd & (one <= three), torch.where(is_odd, torch.minimum(one, three), pair)
    flips = torch.cat([at, first, second, second ^ apart], dim=-1)
    is_flip = torch.cat([is_one, is_odd & ~is_one, ~is_one, ~is_one], dim=-1) & total.isfinite()
    # Two flips of one number are none: where the check bits are 0, and never where the nearest is the third.
    found = torch.zeros_like(cost, dtype=torch.uint8).scatter_add_(-1, flips, is_flip.to(torch.uint8)) & 1
    return found.bool().flatten(-2)[..., :dim]


def nearest_scales(low: Tensor, own: Tensor, n_bits: int = 8) -> Tensor:
    """Return the numbers with these low bits that are nearest to the own ones, and of the same sign."""
    bits, half = own.view(torch.int16).int(), 1 << n_bits - 1
    size = bits & 0x7FFF
    size = (size + (low.int() - size + half & 2 * half - 1) - half).clamp(0, 0x7F7F)
    return (size | bits & ~0x7FFF).to(torch.int16).view(SCALE_DTYPE)


def _fp8_values(numbers: Tensor) -> Tensor:
    """Return what the codes of these numbers stand for, without the scale."""
    return torch.where(numbers < 0, 128 - numbers, numbers).to(torch.uint8).view(torch.float8_e4m3fn).float()


def _each(codes: Tensor, kv_dtype: str) -> Tensor:
    """Return the code of each number in a byte of its own."""
    return torch.cat([codes & 15, codes >> 4], dim=-1) if kv_dtype == "int4" else codes


def quantized_bytes(dim: int, kv_dtype: str | None, dtype: torch.dtype) -> int:
    """Return the bytes of a vector in a cache of this dtype, its scale included."""
    if kv_dtype is None:
        return dim * dtype.itemsize
    n_codes, n_scales = (dim // 2, 2 * -(-dim // SCALE_GROUP)) if kv_dtype == "int4" else (dim, 1)
    return n_codes + n_scales * SCALE_DTYPE.itemsize


def record_bytes(dim: int, kv_dtype: str, group: int) -> int:
    """Return the bytes of a vector's `record_of`."""
    return -(-(-(-dim // group) * group.bit_length()) // 8) + _low_bytes(dim, kv_dtype)


def _low_bytes(dim: int, kv_dtype: str) -> int:
    """Return the bytes of a vector's record that are of its scales."""
    return -(-dim // SCALE_GROUP) if kv_dtype == "int4" else 1
