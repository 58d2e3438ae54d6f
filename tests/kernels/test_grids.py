"""Launches of any size stay within CUDA's grid limits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from lit_rlkv.kernels.decode_attention import kernel as decode_kernel
from lit_rlkv.kernels.evict import kernel as evict_kernel
from lit_rlkv.kernels.shadow_attention import launch
from lit_rlkv.kernels.slot_scores import keys_kernel, window_kernel
from lit_rlkv.kernels.token_logps import kernel as logits_kernel
from lit_rlkv.kernels.token_sampling import kernel as sampling_kernel

LIMITS = (2**31 - 1, 65_535, 65_535)
BATCH, KV_HEADS, SLOTS, SEQ, DIM = 2048, 32, 300, 300, 16

Grid = tuple[int, ...]

empty = partial(torch.empty, device="meta", dtype=torch.float16)
integers = partial(torch.empty, device="meta", dtype=torch.int64)
flags = partial(torch.empty, device="meta", dtype=torch.bool)


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> dict[str, Grid]:
    """Record the grid of every kernel that the test launches, by name; nothing runs."""
    found: dict[str, Grid] = {}

    def noted(kernel: Any, grid: Grid) -> Callable[..., None]:
        found[kernel.__name__] = grid
        return lambda *args, **kwargs: None

    monkeypatch.setattr(KernelInterface, "__getitem__", noted)
    return found


def pools() -> tuple[Tensor, Tensor]:
    return empty(BATCH, KV_HEADS, SLOTS, DIM), empty(BATCH, KV_HEADS, SLOTS, DIM)


def decode() -> None:
    query = empty(BATCH, KV_HEADS, 2, DIM)
    for n_splits in (1, 2):
        decode_kernel.decode_attention(query, *pools(), integers(BATCH), 1.0, n_splits=n_splits)


def evict() -> None:
    scores, columns = empty(BATCH, KV_HEADS, SLOTS), integers(BATCH, KV_HEADS, SLOTS)
    pool = (scores, *pools(), columns, None, integers(BATCH, KV_HEADS, SEQ))
    rows = (flags(BATCH), integers(BATCH), integers(BATCH))
    evict_kernel.evict(*pool, *rows, budget=200, sink=1, window=1)


def score() -> None:
    keys, values = pools()
    is_live, queries = flags(BATCH, KV_HEADS, SLOTS), empty(BATCH, KV_HEADS, 2, 3, DIM)
    keys_kernel.key_direction_similarity(keys, is_live)
    keys_kernel.redundancy(keys, is_live)
    window_kernel.expected_attention(queries, keys, values, is_live, 1.0)


def learn() -> None:
    query, key, value = empty(BATCH, 2 * KV_HEADS, SEQ, DIM), *(2 * [empty(BATCH, KV_HEADS, SEQ, DIM)])
    evicted_at = torch.empty(BATCH, KV_HEADS, SEQ, dtype=torch.int32, device="meta")
    inputs = launch.Inputs(query, key, value, evicted_at, 1.0, None, block=128, n_slots=160)
    out, lse = launch.forward(inputs)
    launch.backward(inputs, out, lse, out, lse, slot_of=evicted_at)


def compare() -> None:
    n_rows, vocab = BATCH * KV_HEADS, 151_936
    p, q, upstream = empty(n_rows, vocab), empty(n_rows, vocab), empty(n_rows, dtype=torch.float32)
    tokens = integers(n_rows)
    _, _, stats = logits_kernel.chosen_forward(p, tokens, 1.0)
    logits_kernel.chosen_backward(upstream, p, tokens, stats, 1.0)
    kl, stats = logits_kernel.kl_forward(p, q, 1.0)
    logits_kernel.kl_backward(upstream, p, q, kl, stats, 1.0, True, True)


def sample() -> None:
    sampling_kernel.sample_with_seed(empty(BATCH * KV_HEADS, 151_936), 1.0, integers(1))


KERNELS = {
    decode: {"_attend", "_merge"},
    evict: {"_choose", "_move"},
    score: {
        *("_norm", "_direction_of_block", "_similarity_to_direction", "_similarity_of_rows"),
        *("_spare_duplicates", "_visit_blocks", "_merge_blocks"),
    },
    learn: {"_table", "_forward", "_delta", "_query_gradients", "_key_gradients"},
    sample: {"_sum_blocks", "_choose_token"},
    compare: {"_chosen_forward", "_chosen_backward", "_kl_forward", "_kl_backward"},
}


@pytest.mark.parametrize("call", KERNELS, ids=lambda call: call.__name__)
def test_2048_prompts_of_32_heads_can_be_launched(call: Callable[[], None], grids: dict[str, Grid]):
    call()
    assert set(grids) == KERNELS[call]
    for kernel, grid in grids.items():
        assert all(size <= limit for size, limit in zip(grid, LIMITS, strict=False)), (kernel, grid)
        # More programs than axes 1 and 2 may have: on one of them the comparison would have caught it.
        assert max(grid) >= BATCH * KV_HEADS > LIMITS[1]
