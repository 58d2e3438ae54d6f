"""Scores computed from the keys alone, without a float32 copy of them and without a [slot, slot] tensor.

    norm        n = ‖k‖
    direction   cos(k, d),  d = Σ over live keys of k/‖k‖
    redundancy  softmax over live j of (Σ_{i≠j} c_ij − Σ_{i: latest(i)=j} c_ij) / n_live,  c = cosine,
                latest(i) = the last j ≠ i with c_ij > 0.5

Each program takes one block of slots of one row and KV head, so a step with a single due row still has many
programs. Tensors are [batch, kv_head, slot] if not stated otherwise; keys are [batch, kv_head, slot, dim] and
is_due is [batch].

direction: `_direction_of_block` sums k/‖k‖ over a block. `_similarity_to_direction` adds the blocks and
compares. The keys are read twice.

redundancy: c is symmetric, so the sum of a column is the sum of a row. A program owns its rows and needs no
atomics. `_similarity_of_rows` multiplies its block of keys with all blocks on the tensor cores, in the dtype
of the keys; products are exact enough in float32, and the norms divide afterwards. It writes the sums, the
latest duplicates and their cosines. `_spare_duplicates` subtracts from each key the cosines of the rows whose
latest duplicate it is. The softmax over slots is torch's, on [batch, kv_head, slot].
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from lit_rlkv.kernels.backend import on_tensor_device, with_unit_stride
from lit_rlkv.kernels.slot_scores.reference import NEAR_DUPLICATE
from lit_rlkv.kernels.triton_functions import due_argument, is_row_due, load_flags, load_vectors

TILE = 8192
"""Largest tile of keys, in numbers, without matrix products: 64 registers per thread in float32."""
MAX_BLOCK, DUPLICATE_BLOCK = 64, 64
N_WARPS = 4

NEAR = tl.constexpr(NEAR_DUPLICATE)
SMALLEST_NORM = tl.constexpr(1e-12)  # as torch's normalize and cosine_similarity bound their divisors
SMALLEST_COSINE_NORM = tl.constexpr(1e-8)


@triton.jit
@no_type_check
def _norm(
    keys, norms, is_due, keys_row, keys_head, keys_slot, n_heads, n_slots, dim,
    HAS_DUE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the norm of each key."""
    pool = tl.program_id(0).to(tl.int64)
    row, head = pool // n_heads, pool % n_heads
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    norm = tl.zeros([BLOCK], tl.float32)
    if is_row_due(is_due, row, HAS_DUE):
        keys += row * keys_row + head * keys_head
        key = load_vectors(keys, slot, slot < n_slots, keys_slot, dim, DIM).to(tl.float32)
        norm = tl.sqrt(tl.sum(key * key, axis=1))
    tl.store(norms + pool * n_slots + slot, norm, mask=slot < n_slots)


@triton.jit
@no_type_check
def _direction_of_block(
    keys, is_live, directions, is_due, keys_row, keys_head, keys_slot, n_heads, n_slots, dim,
    HAS_DUE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write Σ k/‖k‖ over the live keys of a block; directions: [batch, kv_head, block, dim]."""
    pool = tl.program_id(0).to(tl.int64)
    row, head = pool // n_heads, pool % n_heads
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if is_row_due(is_due, row, HAS_DUE):
        keys += row * keys_row + head * keys_head
        is_wanted = load_flags(is_live + pool * n_slots, slot, n_slots)
        key = load_vectors(keys, slot, is_wanted, keys_slot, dim, DIM).to(tl.float32)
        norm = tl.sqrt(tl.sum(key * key, axis=1))
        unit = key / tl.maximum(norm, SMALLEST_NORM)[:, None]
        d = tl.arange(0, DIM)
        directions += (pool * tl.num_programs(1) + tl.program_id(1)) * dim
        tl.store(directions + d, tl.sum(unit, axis=0), mask=d < dim)


@triton.jit
@no_type_check
def _similarity_to_direction(
    keys, directions, similarity, is_due, keys_row, keys_head, keys_slot, n_heads, n_slots, dim,
    HAS_DUE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the cosine of each key and the sum of all directions."""
    pool, n_blocks = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    row, head = pool // n_heads, pool % n_heads
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cosine = tl.zeros([BLOCK], tl.float32)
    if is_row_due(is_due, row, HAS_DUE):
        directions += pool * n_blocks * dim
        direction = tl.zeros([DIM], tl.float32)
        for start in range(0, n_blocks, 16):
            block = start + tl.arange(0, 16)
            direction += tl.sum(load_vectors(directions, block, block < n_blocks, dim, dim, DIM), axis=0)
        keys += row * keys_row + head * keys_head
        key = load_vectors(keys, slot, slot < n_slots, keys_slot, dim, DIM).to(tl.float32)
        length = tl.sqrt(tl.sum(direction * direction, axis=0))
        direction = direction / tl.maximum(length, SMALLEST_COSINE_NORM)
        norm = tl.maximum(tl.sqrt(tl.sum(key * key, axis=1)), SMALLEST_COSINE_NORM)
        cosine = tl.sum(key * direction[None, :], axis=1) / norm
    tl.store(similarity + pool * n_slots + slot, cosine, mask=slot < n_slots)


@triton.jit
@no_type_check
def _inverse_norms(norms, is_live, slot, n_slots):
    """Return 1/‖k‖ of a block of slots (0 on padding), and a mask of the live slots."""
    norm = tl.load(norms + slot, mask=slot < n_slots, other=1.0)
    is_wanted = load_flags(is_live, slot, n_slots)
    return tl.where(is_wanted, 1.0 / tl.maximum(norm, SMALLEST_NORM), 0.0), is_wanted


@triton.jit
@no_type_check
def _similarity_of_rows(
    keys, norms, is_live, sums, latest, spared, is_due, keys_row, keys_head, keys_slot, n_heads, n_slots, dim,
    HAS_DUE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Write the sum of cosines of each key, its latest duplicate, and the cosine of the two."""
    pool = tl.program_id(0).to(tl.int64)
    row, head = pool // n_heads, pool % n_heads
    if is_row_due(is_due, row, HAS_DUE):
        keys += row * keys_row + head * keys_head
        norms, is_live = norms + pool * n_slots, is_live + pool * n_slots
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inverse_i, is_live_i = _inverse_norms(norms, is_live, i, n_slots)
        key_i = load_vectors(keys, i, is_live_i, keys_slot, dim, DIM)
        total = tl.zeros([BLOCK], tl.float32)
        last = tl.full([BLOCK], -1, tl.int32)
        for start in range(0, n_slots, BLOCK_J):
            j = start + tl.arange(0, BLOCK_J)
            inverse_j, is_live_j = _inverse_norms(norms, is_live, j, n_slots)
            key_j = load_vectors(keys, j, is_live_j, keys_slot, dim, DIM)
            products = tl.dot(key_i, tl.trans(key_j), input_precision="ieee")
            cosine = products * inverse_i[:, None] * inverse_j[None, :]
            cosine = tl.where(i[:, None] == j[None, :], 0.0, cosine)
            total += tl.sum(cosine, axis=1)
            last = tl.maximum(last, tl.max(tl.where(cosine > NEAR, j[None, :], -1), axis=1))
        # Multiplying a key with its latest duplicate again is cheaper than carrying the cosine along.
        key_last = load_vectors(keys, last, last >= 0, keys_slot, dim, DIM).to(tl.float32)
        norm_last = tl.load(norms + last, mask=last >= 0, other=1.0)
        products = tl.sum(key_i.to(tl.float32) * key_last, axis=1)
        at = pool * n_slots + i
        tl.store(sums + at, total, mask=i < n_slots)
        tl.store(latest + at, last, mask=i < n_slots)
        tl.store(spared + at, products * inverse_i / tl.maximum(norm_last, SMALLEST_NORM), mask=i < n_slots)


@triton.jit
@no_type_check
def _spare_duplicates(
    sums, latest, spared, is_live, means, is_due, n_heads, n_slots,
    HAS_DUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the mean cosine of each key, leaving out rows whose latest duplicate it is."""
    pool = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_live += pool * n_slots
    mean = tl.zeros([BLOCK], tl.float32)
    if is_row_due(is_due, pool // n_heads, HAS_DUE):
        lost = tl.zeros([BLOCK], tl.float32)
        n_live = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n_slots, BLOCK):
            i = start + tl.arange(0, BLOCK)
            last = tl.load(latest + pool * n_slots + i, mask=i < n_slots, other=-1)
            cosine = tl.load(spared + pool * n_slots + i, mask=i < n_slots, other=0.0)
            lost += tl.sum(tl.where(last[None, :] == j[:, None], cosine[None, :], 0.0), axis=1)
            n_live += load_flags(is_live, i, n_slots).to(tl.int32)
        total = tl.load(sums + pool * n_slots + j, mask=j < n_slots, other=0.0)
        mean = (total - lost) / tl.sum(n_live, axis=0).to(tl.float32)
        mean = tl.where(load_flags(is_live, j, n_slots), mean, -float("inf"))
    tl.store(means + pool * n_slots + j, mean, mask=j < n_slots)


@on_tensor_device
def key_norm(keys, is_due=None):
    keys = with_unit_stride(keys)
    norms = torch.empty(keys.shape[:3], dtype=torch.float32, device=keys.device)
    due, has_due = due_argument(is_due, keys)
    sizes, grid = _vector_launch(keys)
    _norm[grid](keys, norms, due, *_layout(keys), HAS_DUE=has_due, **sizes)
    return norms


@on_tensor_device
def key_direction_similarity(keys, is_live, is_due=None):
    keys = with_unit_stride(keys)
    sizes, grid = _vector_launch(keys)
    similarity = torch.empty(keys.shape[:3], dtype=torch.float32, device=keys.device)
    directions = torch.empty(*grid, keys.shape[-1], dtype=torch.float32, device=keys.device)
    due, has_due = due_argument(is_due, keys)
    sizes = {"HAS_DUE": has_due, **sizes}
    _direction_of_block[grid](keys, is_live.contiguous(), directions, due, *_layout(keys), **sizes)
    _similarity_to_direction[grid](keys, directions, similarity, due, *_layout(keys), **sizes)
    return similarity


@on_tensor_device
def redundancy(keys, is_live, is_due=None):
    keys, live = with_unit_stride(keys), is_live.contiguous()
    norms = key_norm(keys, is_due)
    sums, spared, means = (torch.empty_like(norms) for _ in range(3))
    latest = torch.empty_like(norms, dtype=torch.int32)
    due, has_due = due_argument(is_due, keys)
    sizes = _matrix_launch(keys)
    n_pools, n_slots = keys.shape[0] * keys.shape[1], keys.shape[2]
    _similarity_of_rows[(n_pools, triton.cdiv(n_slots, sizes["BLOCK"]))](
        *(keys, norms, live, sums, latest, spared, due, *_layout(keys)), HAS_DUE=has_due, **sizes
    )
    _spare_duplicates[(n_pools, triton.cdiv(n_slots, DUPLICATE_BLOCK))](
        *(sums, latest, spared, live, means, due, keys.shape[1], n_slots),
        HAS_DUE=has_due,
        BLOCK=DUPLICATE_BLOCK,
        num_warps=N_WARPS,
    )
    scores = means.softmax(-1)
    return scores if is_due is None else scores.masked_fill(~is_due[:, None, None], 0.0)


def _layout(keys: Tensor) -> tuple[int, ...]:
    """Return the strides of row, KV head and slot, and the numbers of KV heads, slots and dimensions."""
    return (*keys.stride()[:3], *keys.shape[1:])


def _vector_launch(keys: Tensor) -> tuple[dict[str, int], tuple[int, int]]:
    """Return tile sizes and grid of the kernels that read each key once."""
    width = triton.next_power_of_2(keys.shape[-1])
    block = min(max(TILE // width, 1), MAX_BLOCK, triton.next_power_of_2(keys.shape[2]))
    grid = (keys.shape[0] * keys.shape[1], triton.cdiv(keys.shape[2], block))
    return {"DIM": width, "BLOCK": block, "num_warps": N_WARPS}, grid


def _matrix_launch(keys: Tensor) -> dict[str, int]:
    """Return tile sizes, warps and stages of the kernel that multiplies keys with keys."""
    width = max(triton.next_power_of_2(keys.shape[-1]), 16)
    if keys.element_size() == 4:
        # Tensor cores do not multiply float32 exactly; plain multiplications keep operands in registers.
        return {"DIM": width, "BLOCK": 32, "BLOCK_J": 32, "num_warps": 4, "num_stages": 1}
    # Small enough for several programs per multiprocessor: comparing and adding cosines takes about as long
    # as multiplying keys, so one program compares while another multiplies.
    others = 64 if width <= 128 else 32
    return {"DIM": width, "BLOCK": 64, "BLOCK_J": others, "num_warps": 4, "num_stages": 3}
