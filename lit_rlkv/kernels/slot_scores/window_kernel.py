"""Scores computed from a window of queries, without a [window, slot] tensor.

    mean       1/(G·W) Σ_gw softmax_k(l_gwk)              l_gwk = q_gw·k·scaling, over the keys that q_gw sees
    peak       1/W     Σ_w  softmax_k(max_g l_gwk)        over those of them that are not recent
    expected   ‖v_k‖/G Σ_g  softmax_k(mean_w + var_w/2)   of l_gwk, over live keys

Each program takes one block of slots of one row and KV head, so a step with a single due row still has many
programs. Each softmax covers all blocks. A first visit of all blocks writes the largest logit and the sum of
exponentials of every softmax over the block; `_merge_blocks` merges these; a second visit recomputes the
logits and divides by the total. The keys are read twice. Storing the logits instead would take G·W float32
numbers per slot, more than the slot's key at any usual window, each written and read once.

A block of keys stays on the chip while the program goes through all queries that share it.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_rlkv.kernels.backend import on_tensor_device, with_unit_stride
from lit_rlkv.kernels.triton_functions import due_argument, is_row_due, load_flags, load_vectors

MERGE_BLOCK = 64
"""Softmaxes merged by one program."""
MERGED_AT_ONCE = tl.constexpr(16)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
@no_type_check
def _store_sums(sums, at, logits, is_counted, is_stored, axis: tl.constexpr):
    """Store the largest counted logit of each softmax (-inf if none) and Σ exp(logit - largest)."""
    top = tl.max(tl.where(is_counted, logits, -INFINITY), axis=axis)
    exps = tl.where(is_counted, tl.exp(logits - tl.expand_dims(top, axis)), 0.0)
    tl.store(sums + 2 * at, top, mask=is_stored)
    tl.store(sums + 2 * at + 1, tl.sum(exps, axis=axis), mask=is_stored)


@triton.jit
@no_type_check
def _logits(queries, key, w, query_window, n_window, dim, scaling, DIM: tl.constexpr):
    """Return the logits of queries `w` of one head with a block of keys [BLOCK, DIM]: [BLOCK_W, BLOCK]."""
    query = load_vectors(queries, w, w < n_window, query_window, dim, DIM)
    return tl.dot(query, tl.trans(key), input_precision="ieee") * scaling


@triton.jit
@no_type_check
def _exponents(
    queries, key, query_window, n_window, dim, scaling,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Return mean + variance/2 over the window of one head's logits: [BLOCK]."""
    mean = tl.zeros([BLOCK], tl.float32)
    spread = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_window, BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        logits = _logits(queries, key, w, query_window, n_window, dim, scaling, DIM)
        # Merge means and sums of squared deviations of blocks (Chan et al.).
        n_before = start * 1.0
        n_new = tl.minimum(n_window - start, BLOCK_W) * 1.0
        new_mean = tl.sum(logits, axis=0) / n_new
        offset = tl.where((w < n_window)[:, None], logits - new_mean[None, :], 0.0)
        gap = new_mean - mean
        mean += gap * (n_new / (n_before + n_new))
        spread += tl.sum(offset * offset, axis=0) + gap * gap * (n_before * n_new / (n_before + n_new))
    return mean + spread / (2.0 * n_window)


@triton.jit
@no_type_check
def _seen(columns, query_columns, is_wanted, slot, w, n_slots, n_window):
    """Return a mask of the keys of a block that queries `w` of the window see: [BLOCK_W, BLOCK]."""
    column = tl.load(columns + slot, mask=slot < n_slots, other=0)
    query_column = tl.load(query_columns + w, mask=w < n_window, other=0)
    is_earlier = column[None, :] <= query_column[:, None]
    return is_earlier & is_wanted[None, :] & (w < n_window)[:, None]


@triton.jit
@no_type_check
def _visit_blocks(
    queries, keys, values, columns, query_columns, is_wanted, sums, merged, scores, is_due, scaling,
    query_row, query_head, query_group, query_window, keys_row, keys_head, keys_slot,
    values_row, values_head, values_slot, n_heads, n_slots, dim, dim_v, group, n_window, n_softmax,
    SCORES: tl.constexpr, KIND: tl.constexpr, HAS_DUE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write the sums of one block of slots, or with SCORES its scores.

    queries: [batch, kv_head, group, window, dim]; keys, values: [batch, kv_head, slot, dim];
    columns, is_wanted, scores: [batch, kv_head, slot]; query_columns: [batch, window]; is_due: [batch];
    sums: [batch, kv_head, block, softmax, 2]; merged: [batch, kv_head, softmax, 2].
    """
    pool = tl.program_id(0).to(tl.int64)
    row, head = pool // n_heads, pool % n_heads
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.zeros([BLOCK], tl.float32)
    if is_row_due(is_due, row, HAS_DUE):
        queries += row * query_row + head * query_head
        columns += pool * n_slots
        query_columns += row * n_window
        sums += (pool * tl.num_programs(1) + tl.program_id(1)) * n_softmax * 2
        merged += pool * n_softmax * 2
        wanted = load_flags(is_wanted + pool * n_slots, slot, n_slots)
        key = load_vectors(keys + row * keys_row + head * keys_head, slot, wanted, keys_slot, dim, DIM)
        if KIND == "expected":
            for g in range(group):
                query = queries + g * query_group
                exponent = _exponents(query, key, query_window, n_window, dim, scaling, DIM, BLOCK, BLOCK_W)
                if SCORES:
                    prob = tl.exp(exponent - tl.load(merged + 2 * g)) / tl.load(merged + 2 * g + 1)
                    score += tl.where(wanted, prob, 0.0)
                else:
                    _store_sums(sums, g, exponent, wanted, True, 0)
            if SCORES:
                values += row * values_row + head * values_head
                value = load_vectors(values, slot, wanted, values_slot, dim_v, DIM_V).to(tl.float32)
                score *= tl.sqrt(tl.sum(value * value, axis=1))
        else:
            # mean: each head of the group has its own softmax. peak: one softmax of the maximum over heads.
            n_own = 1 if KIND == "peak" else group
            n_joined = group if KIND == "peak" else 1
            for start in range(0, n_window, BLOCK_W):
                w = start + tl.arange(0, BLOCK_W)
                is_seen = _seen(columns, query_columns, wanted, slot, w, n_slots, n_window)
                for own in range(n_own):
                    logits = tl.full([BLOCK_W, BLOCK], -INFINITY, tl.float32)
                    for joined in range(n_joined):
                        query = queries + (own + joined) * query_group
                        product = _logits(query, key, w, query_window, n_window, dim, scaling, DIM)
                        logits = tl.maximum(logits, product)
                    at = own * n_window + w
                    if SCORES:
                        top = tl.load(merged + 2 * at, mask=w < n_window, other=0.0)
                        share = 1.0 / tl.load(merged + 2 * at + 1, mask=w < n_window, other=1.0)
                        probs = tl.exp(logits - top[:, None]) * share[:, None]
                        score += tl.sum(tl.where(is_seen, probs, 0.0), axis=0)
                    else:
                        _store_sums(sums, at, logits, is_seen, w < n_window, 1)
    if SCORES:
        tl.store(scores + pool * n_slots + slot, score / n_softmax, mask=slot < n_slots)


@triton.jit
@no_type_check
def _merge_blocks(
    sums, merged, is_due, n_heads, n_blocks, n_softmax, HAS_DUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the sums of all blocks; tensors as in `_visit_blocks`."""
    pool = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if is_row_due(is_due, pool // n_heads, HAS_DUE):
        sums += pool * n_blocks * n_softmax * 2
        top = tl.full([BLOCK], -INFINITY, tl.float32)
        for start in range(0, n_blocks, MERGED_AT_ONCE):
            block = start + tl.arange(0, MERGED_AT_ONCE)
            is_sum = (block < n_blocks)[:, None] & (s < n_softmax)[None, :]
            at = 2 * (block[:, None] * n_softmax + s[None, :])
            tops = tl.load(sums + at, mask=is_sum, other=-INFINITY)
            top = tl.maximum(top, tl.max(tops, axis=0))
        top = tl.where(top == -INFINITY, 0.0, top)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, n_blocks, MERGED_AT_ONCE):
            block = start + tl.arange(0, MERGED_AT_ONCE)
            is_sum = (block < n_blocks)[:, None] & (s < n_softmax)[None, :]
            at = 2 * (block[:, None] * n_softmax + s[None, :])
            tops = tl.load(sums + at, mask=is_sum, other=-INFINITY)
            totals = tl.load(sums + at + 1, mask=is_sum, other=0.0)
            total += tl.sum(tl.exp(tops - top[None, :]) * totals, axis=0)
        merged += pool * n_softmax * 2
        tl.store(merged + 2 * s, top, mask=s < n_softmax)
        tl.store(merged + 2 * s + 1, total, mask=s < n_softmax)


def mean_window_attention(queries, keys, columns, query_columns, is_live, scaling, is_due=None):
    return _score("mean", queries, keys, keys, columns, query_columns, is_live, scaling, is_due)


def peak_window_attention(queries, keys, columns, query_columns, is_live, is_recent, scaling, is_due=None):
    is_wanted = is_live & ~is_recent
    return _score("peak", queries, keys, keys, columns, query_columns, is_wanted, scaling, is_due)


def expected_attention(queries, keys, values, is_live, scaling, is_due=None):
    # Columns are not read for this kind; `is_live` only fills the arguments.
    return _score("expected", queries, keys, values, is_live, is_live, is_live, scaling, is_due)


@on_tensor_device
def _score(kind, queries, keys, values, columns, query_columns, is_wanted, scaling, is_due):
    """Run the two visits and the merge between them; `kind` is mean, peak or expected."""
    queries, keys, values = (with_unit_stride(pool) for pool in (queries, keys, values))
    columns, query_columns, is_wanted = (t.contiguous() for t in (columns, query_columns, is_wanted))
    due, has_due = due_argument(is_due, keys)
    batch, n_heads, n_slots, dim = keys.shape
    group, n_window = queries.shape[2:4]
    n_softmax = {"mean": group * n_window, "peak": n_window, "expected": group}[kind]
    sizes = _launch(keys, n_window)
    grid = (batch * n_heads, triton.cdiv(n_slots, sizes["BLOCK"]))
    sums = torch.empty(*grid, n_softmax, 2, dtype=torch.float32, device=keys.device)
    merged = torch.empty(grid[0], n_softmax, 2, dtype=torch.float32, device=keys.device)
    scores = torch.empty(batch, n_heads, n_slots, dtype=torch.float32, device=keys.device)
    tensors = (queries, keys, values, columns, query_columns, is_wanted, sums, merged, scores, due)
    strides = (*queries.stride()[:4], *keys.stride()[:3], *values.stride()[:3])
    numbers = (n_heads, n_slots, dim, values.shape[-1], group, n_window, n_softmax)
    shapes = {"KIND": kind, "DIM_V": triton.next_power_of_2(values.shape[-1]), **sizes}
    _visit_blocks[grid](*tensors, scaling, *strides, *numbers, SCORES=False, HAS_DUE=has_due, **shapes)
    _merge_blocks[(grid[0], triton.cdiv(n_softmax, MERGE_BLOCK))](
        *(sums, merged, due, n_heads, grid[1], n_softmax), HAS_DUE=has_due, BLOCK=MERGE_BLOCK, num_warps=4
    )
    _visit_blocks[grid](*tensors, scaling, *strides, *numbers, SCORES=True, HAS_DUE=has_due, **shapes)
    return scores


def _launch(keys: Tensor, n_window: int) -> dict[str, int]:
    """Return tile sizes, warps and stages; tensor cores take at least 16 queries."""
    width = max(triton.next_power_of_2(keys.shape[-1]), 16)
    queries = min(max(triton.next_power_of_2(n_window), 16), 32)
    if keys.element_size() == 4:
        # Tensor cores do not multiply float32 exactly; plain multiplications keep operands in registers.
        return {"DIM": width, "BLOCK": 32, "BLOCK_W": queries, "num_warps": 4, "num_stages": 1}
    block = 128 if width <= 128 else 64
    return {"DIM": width, "BLOCK": block, "BLOCK_W": queries, "num_warps": 4, "num_stages": 2}
