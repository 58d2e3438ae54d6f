"""Decode attention over the live slots, with the probabilities that eviction needs, in Triton.

    out[h] = Σ_s p[h, s] v[s]
    p[h, s] = exp(l[h, s] - peak[h]) / total[h],  where l = scaling q·k, softcapped or not
    received[s] = mean over the heads h of the group of p[h, s]

A program handles one row and KV head (a pair). All query heads of the group are the rows of one tile, so K
and V are read once. It streams over the live slots with an online softmax in float32. Probabilities are known
only after the last slot. If they are needed, the program keeps its float32 logits in a scratch buffer, small
compared with K and V, and reads them back at the end.

A small batch leaves multiprocessors idle. Then several programs share the slots of a pair: each writes its
softmax-weighted mean, peak and total, and a second kernel merges them in the order of the slots. Without
`n_splits` their number depends on the device and on shapes, the number of rows among them. There are no
atomics, so results are deterministic.

Codes of a quantized cache are numbers in the tile: code · scale, exactly as `kernels.quantization` has it, in
float32 and then in the dtype of the query. The bits of fp8 are read as integers, for GPUs without that type.
Those of int4 stand for turned vectors: so is the query before, and the output after, once a step.

A sink is a logit without a key: the running peak and total of the first split begin with it.

Logits are in units of log 2, for exp2. Scratch: logits [pair, group, slot], outputs of the splits
[pair, split, group, dim_v], peaks and totals [pair, split, group].
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_rlkv.kernels.backend import on_tensor_device, with_unit_stride
from lit_rlkv.kernels.decode_attention.launch import next_power_of_2, padded, plan, shared_block, value_dim
from lit_rlkv.kernels.quantization import SCALE_GROUP as GROUP_SIZE
from lit_rlkv.kernels.quantization import turned
from lit_rlkv.kernels.triton_functions import tanh

LOG2_E = tl.constexpr(1.4426950408889634)
SCALE_GROUP = tl.constexpr(GROUP_SIZE)


@triton.jit
@no_type_check
def _vectors(end):
    """Return the next multiple of 16, so that the compiler vectorizes loads and stores of logits."""
    return tl.cdiv(end, 16) * 16


@triton.jit
@no_type_check
def _write_received(
    logits, received, received_step, peak, total, slots, n_slots, n_live, logit_step,
    GROUP: tl.constexpr, ACCUMULATES: tl.constexpr,
):  # fmt: skip
    """Turn logits of a block of slots into the group's mean probabilities; peak, total: [heads]."""
    heads = tl.arange(0, peak.shape[0])
    end = tl.minimum(n_live, n_slots)
    is_live = slots < end
    is_logit = (heads < GROUP)[:, None] & (slots < _vectors(end))[None, :]
    tile = tl.load(logits + heads[:, None] * logit_step + slots[None, :], mask=is_logit, other=float("-inf"))
    # Without a live slot the peak is -inf, and the difference of two infinities would be NaN.
    peak = tl.where(total == 0.0, 0.0, peak)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    share = tl.sum(tl.exp2(tile - peak[:, None]) * inverse[:, None], axis=0) / GROUP
    place = received + slots * received_step
    if ACCUMULATES:
        is_older = is_live & (slots != n_live - 1)
        tl.store(place, tl.load(place, mask=is_older, other=0.0) + share, mask=is_live)
    else:
        tl.store(place, share, mask=slots < n_slots)


@triton.jit
@no_type_check
def _load_tile(
    vectors, scales, scale_slot, block, dims, is_slot, is_dim, like,
    DIM: tl.constexpr, KV_DTYPE: tl.constexpr,
):  # fmt: skip
    """Load the vectors at these places, [slot, dim], or what their codes stand for in the dtype of `like`.

    Two halves of a vector share the bytes of int4. Its numbers stay turned.
    """
    is_read = is_slot[:, None] & is_dim[None, :]
    tile = tl.load(vectors, mask=is_read, other=0, eviction_policy="evict_first")
    if KV_DTYPE is not None:
        scales += block[:, None] * scale_slot
        is_scale = is_slot[:, None]
        if KV_DTYPE == "int4":
            scales += (dims // SCALE_GROUP)[None, :]
            is_scale = is_read
        scale = tl.load(scales, mask=is_scale, other=0.0).to(tl.float32)
        codes = tile.to(tl.int32)
        if KV_DTYPE == "int4":
            zero = tl.load(scales + tl.cdiv(DIM, SCALE_GROUP), mask=is_read, other=0.0).to(tl.float32)
            number = tl.where(dims[None, :] < DIM // 2, codes & 15, codes >> 4).to(tl.float32) * scale + zero
        elif KV_DTYPE == "int8":
            number = (codes - ((codes & 128) << 1)).to(tl.float32) * scale
        else:
            # 4 bits of exponent with bias 7, and 3 of mantissa, which count in 2^-9 without an exponent.
            bits = codes & 127
            size = ((bits << 20) + (120 << 23)).to(tl.float32, bitcast=True)
            size = tl.where(bits < 8, bits.to(tl.float32) / 512, size)
            number = tl.where(codes < 128, size, -size) * scale
        tile = number.to(like.dtype)
    return tile


@triton.jit
@no_type_check
def _attend(
    query, keys, values, key_scales, value_scales, n_live, sinks, out, logits, peaks, totals, received,
    query_row, query_kv, query_head, key_row, key_kv, key_slot, value_row, value_kv, value_slot,
    key_scale_row, key_scale_kv, key_scale_slot, value_scale_row, value_scale_kv, value_scale_slot,
    n_live_row, received_row, received_kv, received_slot, logit_step, n_slots, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    HEADS: tl.constexpr, DIMS: tl.constexpr, DIMS_V: tl.constexpr, BLOCK: tl.constexpr,
    N_SPLITS: tl.constexpr, ACCUMULATES: tl.constexpr, SHARED_HEADS: tl.constexpr,
    SHARED_BLOCK: tl.constexpr, PRECISION: tl.constexpr, KV_DTYPE: tl.constexpr,
):  # fmt: skip
    """Write output, peak and total of one pair over one split, and `received` if there is one split.

    Plural capitals (HEADS, DIMS) are sizes padded to a tile's.
    """
    pair = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row, kv_head = pair // KV_HEADS, pair % KV_HEADS
    row_live = tl.load(n_live + row * n_live_row).to(tl.int32)
    end = tl.minimum(row_live, n_slots)
    split_slots = tl.cdiv(tl.cdiv(end, BLOCK), N_SPLITS) * BLOCK
    first = split * split_slots
    end = tl.minimum(first + split_slots, end)

    heads, dims, dims_v = tl.arange(0, HEADS), tl.arange(0, DIMS), tl.arange(0, DIMS_V)
    block = tl.arange(0, BLOCK)
    is_head, is_dim, is_dim_v = heads < GROUP, dims < DIM, dims_v < DIM_V
    query += row * query_row + kv_head * query_kv
    q = tl.load(
        query + heads[:, None] * query_head + dims[None, :],
        mask=is_head[:, None] & is_dim[None, :],
        other=0.0,
    )
    keys += row * key_row + kv_head * key_kv + first.to(tl.int64) * key_slot
    values += row * value_row + kv_head * value_kv + first.to(tl.int64) * value_slot
    if KV_DTYPE is not None:
        key_scales += row * key_scale_row + kv_head * key_scale_kv + first.to(tl.int64) * key_scale_slot
        value_scales += (
            row * value_scale_row + kv_head * value_scale_kv + first.to(tl.int64) * value_scale_slot
        )
    is_packed: tl.constexpr = KV_DTYPE == "int4"
    key_tile = block[:, None] * key_slot + (dims % (DIM // 2) if is_packed else dims)[None, :]
    value_tile = block[:, None] * value_slot + (dims_v % (DIM_V // 2) if is_packed else dims_v)[None, :]
    if logits is not None:
        logits += pair * GROUP * logit_step

    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS, BLOCK], tl.float32)  # summed over its columns once, at the end
    if sinks is not None:  # as a first key without a value, of the first split
        has_sink = is_head & (split == 0)
        sink = tl.load(sinks + kv_head * GROUP + heads, mask=has_sink, other=float("-inf"))
        peak = sink * LOG2_E
        total = tl.where(has_sink[:, None] & (block == 0)[None, :], 1.0, total)
    mean = tl.zeros([HEADS, DIMS_V], tl.float32)
    for start in range(first, end, BLOCK):
        slots = start + block
        is_live = slots < end
        k = _load_tile(
            keys + key_tile, key_scales, key_scale_slot, block, dims, is_live, is_dim, q, DIM, KV_DTYPE
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if softcap is not None:
            s = softcap * tanh(s)
        s = tl.where(is_live[None, :], s, float("-inf"))
        if logits is not None:
            place = logits + heads[:, None] * logit_step + slots[None, :]
            tl.store(place, s, mask=is_head[:, None] & (slots < _vectors(end))[None, :])
        new_peak = tl.maximum(peak, tl.max(s, axis=1))
        decay = tl.exp2(peak - new_peak)
        p = tl.exp2(s - new_peak[:, None])
        total = total * decay[:, None] + p
        v = _load_tile(
            values + value_tile, value_scales, value_scale_slot, block, dims_v, is_live, is_dim_v, q,
            DIM_V, KV_DTYPE,
        )  # fmt: skip
        mean = tl.dot(p.to(v.dtype), v, mean * decay[:, None], input_precision=PRECISION)
        peak = new_peak
        keys += BLOCK * key_slot
        values += BLOCK * value_slot
        if KV_DTYPE is not None:
            key_scales += BLOCK * key_scale_slot
            value_scales += BLOCK * value_scale_slot

    summed = tl.sum(total, axis=1)
    mean = mean / tl.where(summed == 0.0, 1.0, summed)[:, None]
    part = (pair * N_SPLITS + split) * GROUP
    place = out + (part + heads[:, None]) * DIM_V + dims_v[None, :]
    tl.store(place, mean, mask=is_head[:, None] & is_dim_v[None, :])
    tl.store(peaks + part + heads, peak, mask=is_head)
    tl.store(totals + part + heads, summed, mask=is_head)
    if received is not None:
        received += row * received_row + kv_head * received_kv
        tl.debug_barrier()  # other threads of the program wrote the logits read below
        sharing = tl.arange(0, SHARED_HEADS)
        peak = tl.load(peaks + part + sharing, mask=sharing < GROUP, other=0.0)
        summed = tl.load(totals + part + sharing, mask=sharing < GROUP, other=0.0)
        for start in range(0, n_slots, SHARED_BLOCK):
            _write_received(
                logits, received, received_slot, peak, summed, start + tl.arange(0, SHARED_BLOCK), n_slots,
                row_live, logit_step, GROUP, ACCUMULATES,
            )  # fmt: skip


@triton.jit
@no_type_check
def _merge(
    means, logits, peaks, totals, n_live, out, received,
    n_live_row, received_row, received_kv, received_slot, logit_step, n_slots,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM_V: tl.constexpr, DIMS_V: tl.constexpr,
    N_SPLITS: tl.constexpr, SPLITS: tl.constexpr, ACCUMULATES: tl.constexpr, SHARED_HEADS: tl.constexpr,
    SHARED_BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the splits of query head i, and write `received` of block i of the slots."""
    pair = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    splits, dims_v = tl.arange(0, SPLITS), tl.arange(0, DIMS_V)
    is_split = splits < N_SPLITS
    if i < GROUP:
        part = (pair * N_SPLITS + splits) * GROUP + i
        split_peaks = tl.load(peaks + part, mask=is_split, other=float("-inf"))
        split_totals = tl.load(totals + part, mask=is_split, other=0.0)
        peak = tl.max(split_peaks, axis=0)
        weights = split_totals * tl.exp2(split_peaks - tl.where(peak == float("-inf"), 0.0, peak))
        total = tl.sum(weights, axis=0)
        weights = weights / tl.where(total == 0.0, 1.0, total)
        is_mean = is_split[:, None] & (dims_v < DIM_V)[None, :]
        mean = tl.load(means + part[:, None] * DIM_V + dims_v[None, :], mask=is_mean, other=0.0)
        merged = tl.sum(mean * weights[:, None], axis=0)
        tl.store(out + (pair * GROUP + i) * DIM_V + dims_v, merged, mask=dims_v < DIM_V)
    if received is not None:
        row, kv_head = pair // KV_HEADS, pair % KV_HEADS
        sharing = tl.arange(0, SHARED_HEADS)
        part = (pair * N_SPLITS + splits[:, None]) * GROUP + sharing[None, :]
        is_stat = is_split[:, None] & (sharing < GROUP)[None, :]
        split_peaks = tl.load(peaks + part, mask=is_stat, other=float("-inf"))
        split_totals = tl.load(totals + part, mask=is_stat, other=0.0)
        peak = tl.max(split_peaks, axis=0)
        finite = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(split_totals * tl.exp2(split_peaks - finite[None, :]), axis=0)
        row_live = tl.load(n_live + row * n_live_row).to(tl.int32)
        _write_received(
            logits + pair * GROUP * logit_step, received + row * received_row + kv_head * received_kv,
            received_slot, peak, total, i * SHARED_BLOCK + tl.arange(0, SHARED_BLOCK), n_slots, row_live,
            logit_step, GROUP, ACCUMULATES,
        )  # fmt: skip


@on_tensor_device
def decode_attention(
    query, keys, values, n_live, scaling, *, softcap=None, sink=None, received=None, accumulates=False,
    n_splits=None, kv_dtype=None, scales=(),
):  # fmt: skip
    """Run `reference.decode_attention` in Triton."""
    if kv_dtype == "int4":
        query = turned(query).to(query.dtype)
    query, keys, values = (with_unit_stride(tensor) for tensor in (query, keys, values))
    scales = [with_unit_stride(tensor) for tensor in scales] or [None, None]
    launch = plan(query, keys, values, n_splits, kv_dtype)
    is_split = launch.n_splits > 1
    batch, n_kv_heads, group, dim = query.shape
    n_pairs, n_slots, dim_v = batch * n_kv_heads, values.shape[2], value_dim(values, kv_dtype)

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=query.device)

    dtype = values.dtype if kv_dtype is None else query.dtype
    out = torch.empty(batch, n_kv_heads, group, dim_v, dtype=dtype, device=query.device)
    peaks, totals = scratch(n_pairs, launch.n_splits, group), scratch(n_pairs, launch.n_splits, group)
    means = scratch(n_pairs, launch.n_splits, group, dim_v) if is_split else out
    logit_step = triton.cdiv(n_slots, 16) * 16  # aligns rows of logits for vector loads
    sink = None if sink is None else sink.float().contiguous()
    logits = None if received is None else scratch(n_pairs, group, logit_step)
    received_strides = (0, 0, 0) if received is None else received.stride()
    scale_strides = [step for each in scales for step in ((0, 0, 0) if each is None else each.stride()[:3])]
    places = (n_live.stride(0), *received_strides, logit_step, n_slots)
    sizes = {"KV_HEADS": n_kv_heads, "GROUP": group, "DIM_V": dim_v, "DIMS_V": padded(dim_v)}
    precision = "ieee" if query.dtype == torch.float32 else "tf32"  # float32 inputs without TF32
    sizes |= {"N_SPLITS": launch.n_splits, "SHARED_HEADS": next_power_of_2(group), "ACCUMULATES": accumulates}
    _attend[n_pairs, launch.n_splits](
        query, keys, values, *scales, n_live, sink, means, logits, peaks, totals,
        None if is_split else received,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *scale_strides, *places,
        scaling * LOG2_E.value if softcap is None else scaling / softcap,
        None if softcap is None else softcap * LOG2_E.value,
        DIM=dim, HEADS=padded(group), DIMS=padded(dim), BLOCK=launch.block,
        SHARED_BLOCK=shared_block(8192, group, n_slots), PRECISION=precision, KV_DTYPE=kv_dtype,
        num_warps=launch.n_warps, num_stages=launch.n_stages, **sizes,
    )  # fmt: skip
    if is_split:
        block = shared_block(4096, group, n_slots)
        n_blocks = 0 if received is None else triton.cdiv(n_slots, block)
        _merge[n_pairs, max(group, n_blocks)](
            means, logits, peaks, totals, n_live, out, received, *places,
            SPLITS=next_power_of_2(launch.n_splits), SHARED_BLOCK=block, num_warps=8, **sizes,
        )  # fmt: skip
    return turned(out).to(out.dtype) if kv_dtype == "int4" else out
