"""Eviction in place, in two kernels that wait for no host.

    kept = the `budget` largest of (score, or +inf where protected), ties to the earlier slot
    evicted_at[column of slot] = now for the others; slot number i of the pool becomes kept[i]

`_choose`: one program a (row, KV head). Float32 has an integer image of the same order, so the budget-th
largest score is found bit by bit, from the highest: a bit belongs to the threshold if at least `budget`
images reach it. That is 32 passes of counting, over scores that lie in the cache nearest to the program. Ties
take the remaining places in the order of the slots, by a running count. The small arrays (columns, running
attention) move here, and the list of survivors is written for the next kernel.

`_move`: one program a (row, KV head, 128 bytes of each key or value). Survivors come from their own place or
from further behind, kept[i] >= i, so blocks in ascending order overwrite nothing that is still to be read.
Within a block all threads have loaded before any of them stores: that is what the barrier is for. Dimensions
do not mix, so the slices of a pool's vectors are independent programs.

A program of a row that is not due ends at once.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_rlkv.kernels.backend import on_its_device
from lit_rlkv.kernels.evict.reference import check_budget

CHOOSE_BLOCK = 1024
"""Slots counted at once."""
MOVE_BLOCK = 128
"""Slots moved at once: with 128 bytes of each, 16 KiB are under way in every program."""
LINE_BYTES = 128
"""Of each vector that one program moves: a whole line of the cache, so that no two programs share one."""
N_WARPS = 4
N_STAGES = 1
"""A pipelined loop would load the next block before this one is stored; in place, order is all there is."""
WORDS = {2: torch.int16, 4: torch.int32}
"""Numbers are moved as words of their size: their bits, whatever they mean."""

INT32_MIN = tl.constexpr(-(2**31))
INT32_MAX = tl.constexpr(2**31 - 1)
INFINITY = tl.constexpr(float("inf"))
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
@no_type_check
def _image(scores, columns, slot, first, sink, now, window, n_slots):
    """int32 of the same order as what is sorted: [BLOCK], INT32_MIN behind the last slot."""
    is_slot = slot < n_slots
    column = tl.load(columns + slot, mask=is_slot, other=0)
    score = tl.load(scores + slot, mask=is_slot, other=0.0)
    is_protected = (column < first + sink) | (column >= now - window)
    score = tl.where(is_protected, INFINITY, score)
    score = tl.where(column < first, -INFINITY, score)
    # Compared as integers, because a device may take the smallest floats for zero. -0.0 is INT32_MIN; among
    # negative numbers the larger magnitude is the smaller number; beyond infinity is what is not a number.
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits == INT32_MIN, 0, bits)
    image = tl.where(bits < 0, bits ^ INT32_MAX, bits)
    image = tl.where((bits & INT32_MAX) > INFINITY_BITS, INT32_MAX, image)
    return tl.where(is_slot, image, INT32_MIN)


@triton.jit
@no_type_check
def _count(scores, columns, bar, first, sink, now, window, n_slots, BLOCK: tl.constexpr):
    """How many images are at least `bar`."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        image = _image(scores, columns, slot, first, sink, now, window, n_slots)
        counts += (image >= bar).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
@no_type_check
def _choose(
    scores,  # [batch, kv_head, slot] contiguous
    columns,  # [batch, kv_head, slot]
    attention,  # [batch, kv_head, slot]
    evicted_at,  # [batch, kv_head, seq]
    survivors,  # [batch, kv_head, budget] contiguous
    is_due,  # [batch], as are nows and firsts
    nows,
    firsts,
    columns_row,  # strides
    columns_head,
    attention_row,
    attention_head,
    evicted_at_row,
    evicted_at_head,
    n_heads,
    n_slots,
    budget,
    sink,
    window,
    HAS_ATTENTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pool = tl.program_id(0)
    row = (pool // n_heads).to(tl.int64)
    head = (pool % n_heads).to(tl.int64)
    if tl.load(is_due + row) == 0:
        return
    now = tl.load(nows + row)
    first = tl.load(firsts + row)
    scores += pool.to(tl.int64) * n_slots
    survivors += pool.to(tl.int64) * budget
    columns += row * columns_row + head * columns_head
    attention += row * attention_row + head * attention_head
    evicted_at += row * evicted_at_row + head * evicted_at_head

    n_reach = _count(scores, columns, 0, first, sink, now, window, n_slots, BLOCK)
    threshold = tl.where(n_reach >= budget, 0, INT32_MIN)
    # The last bar that too few images reach is threshold + 1: this ends as the count above the threshold.
    n_above = tl.where(n_reach >= budget, 0, n_reach)
    for step in range(31):
        bar = threshold | (1 << (30 - step))
        n_reach = _count(scores, columns, bar, first, sink, now, window, n_slots, BLOCK)
        threshold = tl.where(n_reach >= budget, bar, threshold)
        n_above = tl.where(n_reach >= budget, n_above, n_reach)

    n_ties_left = budget - n_above
    n_kept = 0
    for start in range(0, n_slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        is_slot = slot < n_slots
        image = _image(scores, columns, slot, first, sink, now, window, n_slots)
        is_tie = (image == threshold).to(tl.int32)
        is_kept = (image > threshold) | ((is_tie != 0) & (tl.cumsum(is_tie, axis=0) <= n_ties_left))
        place = n_kept + tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
        n_ties_left -= tl.sum(is_tie, axis=0)
        n_kept += tl.sum(is_kept.to(tl.int32), axis=0)
        column = tl.load(columns + slot, mask=is_slot, other=0)
        if HAS_ATTENTION:
            received = tl.load(attention + slot, mask=is_kept)
        tl.debug_barrier()
        is_evicted = is_slot & ~is_kept & (column >= first)
        tl.store(evicted_at + column, now.to(tl.int32), mask=is_evicted)
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
    keys,  # [batch, kv_head, slot, dim], as words
    values,  # [batch, kv_head, slot, dim_v], as words
    survivors,  # [batch, kv_head, budget] contiguous
    is_due,  # [batch]
    keys_row,  # strides
    keys_head,
    keys_slot,
    values_row,
    values_head,
    values_slot,
    n_heads,
    n_key_parts,
    dim,
    dim_v,
    budget,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pool = tl.program_id(0)
    part = tl.program_id(1)
    row = (pool // n_heads).to(tl.int64)
    head = (pool % n_heads).to(tl.int64)
    if tl.load(is_due + row) == 0:
        return
    survivors += pool.to(tl.int64) * budget
    if part < n_key_parts:
        keys += row * keys_row + head * keys_head
        _move_slice(keys, survivors, keys_slot, part, dim, budget, DIMS, BLOCK)
    else:
        values += row * values_row + head * values_head
        _move_slice(values, survivors, values_slot, part - n_key_parts, dim_v, budget, DIMS, BLOCK)


@on_its_device
def evict(scores, keys, values, columns, attention, evicted_at, is_due, now, first, *, budget, sink, window):
    """Run the definition's operation in Triton; the last dimension of what changes must be contiguous."""
    check_budget(budget, scores)
    in_place = {"keys": keys, "values": values, "columns": columns, "evicted_at": evicted_at}
    for name, tensor in in_place.items():
        _check_contiguous(name, tensor)
    if attention is not None:
        _check_contiguous("attention", attention)
    batch, n_heads, n_slots = columns.shape
    is_due, now, first = is_due.contiguous(), now.contiguous(), first.contiguous()
    survivors = torch.empty(batch, n_heads, budget, dtype=torch.int32, device=keys.device)
    moving = scores if attention is None else attention  # an argument has to be there; it is not read
    _choose[(batch * n_heads,)](
        *(scores.float().contiguous(), columns, moving, evicted_at, survivors, is_due, now, first),
        *(*columns.stride()[:2], *moving.stride()[:2], *evicted_at.stride()[:2]),
        *(n_heads, n_slots, budget, sink, window),
        HAS_ATTENTION=attention is not None,
        BLOCK=min(triton.next_power_of_2(n_slots), CHOOSE_BLOCK),
        num_warps=N_WARPS,
        num_stages=N_STAGES,
    )
    key_words, value_words = (pool.view(WORDS[pool.element_size()]) for pool in (keys, values))
    widest = triton.next_power_of_2(max(keys.shape[-1], values.shape[-1]))
    dims = min(LINE_BYTES // keys.element_size(), widest)
    n_key_parts = triton.cdiv(keys.shape[-1], dims)
    n_parts = n_key_parts + triton.cdiv(values.shape[-1], dims)
    _move[(batch * n_heads, n_parts)](
        *(key_words, value_words, survivors, is_due, *keys.stride()[:3], *values.stride()[:3]),
        *(n_heads, n_key_parts, keys.shape[-1], values.shape[-1], budget),
        DIMS=dims,
        BLOCK=min(triton.next_power_of_2(budget), MOVE_BLOCK),
        num_warps=N_WARPS,
        num_stages=N_STAGES,
    )


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} has stride {tensor.stride(-1)} in its last dimension, "
            "but eviction in place moves whole vectors; allocate it contiguous"
        )
