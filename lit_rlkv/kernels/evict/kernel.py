"""Eviction in place, in two kernels without host synchronisation.

    kept = the `budget` largest of (score, or +inf where protected), ties to the earlier slot
    evicted_at[column of slot] = now for the others; slot number i of the pool becomes kept[i]

`_choose`: one program per row and KV head. Scores are mapped to integers of the same order, and the
budget-th largest is found bit by bit, from the highest: a bit is set in the threshold if at least `budget`
integers reach it. That takes 32 counting passes over scores in the L1 cache. Ties take the remaining places
in the order of the slots, by a running count. The small arrays (columns, running attention) move here, and
the list of survivors is written for the next kernel.

`_move`: one program per row, KV head and 128 bytes of each key or value. A survivor never moves backwards,
kept[i] >= i, so blocks in ascending order overwrite nothing that is still to be read. Within a block, a
barrier separates all loads from the stores. Dimensions are independent, so each slice has its own program.

A program of a row that is not due returns immediately.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from lit_rlkv.kernels.backend import on_tensor_device
from lit_rlkv.kernels.evict.reference import check_budget

CHOOSE_BLOCK = 1024
"""Slots per counting step."""
MOVE_BLOCK = 128
"""Slots moved per step: at 128 bytes each, every program has 16 KiB in flight."""
LINE_BYTES = 128
"""Bytes of each vector that one program moves: a cache line, so that programs share none."""
N_WARPS = 4
N_STAGES = 1
"""No pipelining: in place, a block must be stored before the next one is loaded."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Numbers, codes and scales are moved as integers of their size."""

INT32_MIN = tl.constexpr(-(2**31))
INT32_MAX = tl.constexpr(2**31 - 1)
INFINITY = tl.constexpr(float("inf"))
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
@no_type_check
def _sort_key(scores, columns, slot, first, sink, prompt_end, now, window, n_slots):
    """Return int32 keys in the order of the scores: [BLOCK], INT32_MIN beyond the last slot."""
    is_slot = slot < n_slots
    column = tl.load(columns + slot, mask=is_slot, other=0)
    score = tl.load(scores + slot, mask=is_slot, other=0.0)
    is_protected = (column < tl.maximum(first + sink, prompt_end)) | (column >= now - window)
    score = tl.where(is_protected, INFINITY, score)
    score = tl.where(column < first, -INFINITY, score)
    # Integers, because a device may flush the smallest floats to zero. -0.0 has the bits of INT32_MIN, a
    # larger magnitude is a smaller negative number, and bits above those of infinity are NaN.
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits == INT32_MIN, 0, bits)
    sort_key = tl.where(bits < 0, bits ^ INT32_MAX, bits)
    sort_key = tl.where((bits & INT32_MAX) > INFINITY_BITS, INT32_MAX, sort_key)
    return tl.where(is_slot, sort_key, INT32_MIN)


@triton.jit
@no_type_check
def _count(scores, columns, bar, first, sink, prompt_end, now, window, n_slots, BLOCK: tl.constexpr):
    """Return the number of sort keys that are at least `bar`."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        sort_key = _sort_key(scores, columns, slot, first, sink, prompt_end, now, window, n_slots)
        counts += (sort_key >= bar).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
@no_type_check
def _n_kept(budget, prompt_end, first):
    """Return the keys that a row keeps."""
    return budget + tl.maximum(prompt_end - first, 0).to(tl.int32)


@triton.jit
@no_type_check
def _choose(
    scores, columns, attention, evicted_at, survivors, is_due, nows, firsts,
    columns_row, columns_head, attention_row, attention_head, evicted_at_row, evicted_at_head,
    n_heads, n_slots, budget, most_kept, sink, window, prompt_end,
    HAS_ATTENTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the survivors of one pool, move its columns and attention, and record the evictions.

    scores (contiguous), columns, attention: [batch, kv_head, slot]; evicted_at: [batch, kv_head, seq];
    survivors (contiguous): [batch, kv_head, most_kept]; is_due, nows, firsts: [batch].
    """
    pool = tl.program_id(0)
    row = (pool // n_heads).to(tl.int64)
    head = (pool % n_heads).to(tl.int64)
    if tl.load(is_due + row) == 0:
        return
    now = tl.load(nows + row)
    first = tl.load(firsts + row)
    scores += pool.to(tl.int64) * n_slots
    budget = _n_kept(budget, prompt_end, first)
    survivors += pool.to(tl.int64) * most_kept
    columns += row * columns_row + head * columns_head
    attention += row * attention_row + head * attention_head
    evicted_at += row * evicted_at_row + head * evicted_at_head

    n_reach = _count(scores, columns, 0, first, sink, prompt_end, now, window, n_slots, BLOCK)
    threshold = tl.where(n_reach >= budget, 0, INT32_MIN)
    # The last bar that too few keys reach is threshold + 1, so n_above is the count above the threshold.
    n_above = tl.where(n_reach >= budget, 0, n_reach)
    for step in range(31):
        bar = threshold | (1 << (30 - step))
        n_reach = _count(scores, columns, bar, first, sink, prompt_end, now, window, n_slots, BLOCK)
        threshold = tl.where(n_reach >= budget, bar, threshold)
        n_above = tl.where(n_reach >= budget, n_above, n_reach)

    n_ties_left = budget - n_above
    n_kept = 0
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        is_slot = slot < n_slots
        sort_key = _sort_key(scores, columns, slot, first, sink, prompt_end, now, window, n_slots)
        is_tie = (sort_key == threshold).to(tl.int32)
        is_kept = (sort_key > threshold) | ((is_tie != 0) & (tl.cumsum(is_tie, axis=0) <= n_ties_left))
        place = n_kept + tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
        n_ties_left -= tl.sum(is_tie, axis=0)
        n_kept += tl.sum(is_kept.to(tl.int32), axis=0)
        column = tl.load(columns + slot, mask=is_slot, other=0)
        if HAS_ATTENTION:
            received = tl.load(attention + slot, mask=is_kept)
        tl.debug_barrier()
        is_evicted = is_slot & ~is_kept & (column >= first)
        tl.store(evicted_at + column, now.to(evicted_at.dtype.element_ty), mask=is_evicted)
        tl.store(survivors + place, slot, mask=is_kept)
        tl.store(columns + place, column, mask=is_kept)
        if HAS_ATTENTION:
            tl.store(attention + place, received, mask=is_kept)


@triton.jit
@no_type_check
def _move_slice(pool, survivors, slot_stride, part, dim, budget, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    """pool[i] = pool[survivors[i]] for one slice of the vectors' dimensions, blocks in ascending order."""
    d = part * DIMS + tl.arange(0, DIMS)
    is_dim = (d < dim)[None, :]
    for start in range(0, budget, BLOCK):
        place = start + tl.arange(0, BLOCK)
        source = tl.load(survivors + place, mask=place < budget, other=0)
        is_moved = ((place < budget) & (source != place))[:, None] & is_dim
        words = tl.load(pool + source.to(tl.int64)[:, None] * slot_stride + d[None, :], mask=is_moved)
        tl.debug_barrier()
        tl.store(pool + place.to(tl.int64)[:, None] * slot_stride + d[None, :], words, mask=is_moved)


@triton.jit
@no_type_check
def _move(
    keys, values, survivors, is_due, firsts,
    keys_row, keys_head, keys_slot, values_row, values_head, values_slot,
    n_heads, n_key_parts, dim, dim_v, budget, most_kept, prompt_end, DIMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move one slice of the keys or of the values, [batch, kv_head, slot, dim] as words, of one pool."""
    pool = tl.program_id(0)
    part = tl.program_id(1)
    row = (pool // n_heads).to(tl.int64)
    head = (pool % n_heads).to(tl.int64)
    if tl.load(is_due + row) == 0:
        return
    budget = _n_kept(budget, prompt_end, tl.load(firsts + row))
    survivors += pool.to(tl.int64) * most_kept
    if part < n_key_parts:
        keys += row * keys_row + head * keys_head
        _move_slice(keys, survivors, keys_slot, part, dim, budget, DIMS, BLOCK)
    else:
        values += row * values_row + head * values_head
        _move_slice(values, survivors, values_slot, part - n_key_parts, dim_v, budget, DIMS, BLOCK)


@on_tensor_device
def evict(
    scores, keys, values, columns, attention, evicted_at, is_due, now, first,
    *, budget, sink, window, prompt_end=0, scales=(),
):  # fmt: skip
    """Run `reference.evict` in Triton; the last dimension of tensors changed in place is contiguous."""
    check_budget(budget, scores)
    vectors = {"keys": keys, "values": values, **{f"scales[{i}]": each for i, each in enumerate(scales)}}
    numbers = {"columns": columns, "evicted_at": evicted_at, "attention": attention}
    for name, tensor in (vectors | numbers).items():
        if tensor is not None and tensor.stride(-1) != 1:
            raise ValueError(
                f"the last dimension of {name} {tuple(tensor.shape)} must be contiguous, got stride "
                f"{tensor.stride(-1)}: eviction in place moves whole vectors; allocate it contiguous"
            )
    batch, n_heads, n_slots = columns.shape
    is_due, now, first = is_due.contiguous(), now.contiguous(), first.contiguous()
    most_kept = budget + prompt_end
    survivors = torch.empty(batch, n_heads, most_kept, dtype=torch.int32, device=keys.device)
    moving = scores if attention is None else attention  # not read without attention
    _choose[(batch * n_heads,)](
        *(scores.float().contiguous(), columns, moving, evicted_at, survivors, is_due, now, first),
        *(*columns.stride()[:2], *moving.stride()[:2], *evicted_at.stride()[:2]),
        *(n_heads, n_slots, budget, most_kept, sink, window, prompt_end),
        HAS_ATTENTION=attention is not None,
        BLOCK=min(triton.next_power_of_2(n_slots), CHOOSE_BLOCK),
        num_warps=N_WARPS,
        num_stages=N_STAGES,
    )
    block = min(triton.next_power_of_2(most_kept), MOVE_BLOCK)
    for pair in ((keys, values), tuple(scales)):
        if not pair:
            continue
        words = [pool.view(WORDS[pool.element_size()]) for pool in pair]
        sizes = [pool.shape[-1] for pool in pair]
        dims = min(LINE_BYTES // pair[0].element_size(), triton.next_power_of_2(max(sizes)))
        n_key_parts, n_value_parts = (triton.cdiv(size, dims) for size in sizes)
        _move[(batch * n_heads, n_key_parts + n_value_parts)](
            *(*words, survivors, is_due, first, *(step for pool in pair for step in pool.stride()[:3])),
            *(n_heads, n_key_parts, *sizes, budget, most_kept, prompt_end),
            DIMS=dims,
            BLOCK=block,
            num_warps=N_WARPS,
            num_stages=N_STAGES,
        )
