"""Invariant 9: slots are allocated once and never grow."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlkv.kvcache import POLICIES, CacheSpec, SlotCache
from lit_rlkv.rollout import generate
from lit_rlkv.types import Rollout
from tests.models_zoo import HEAD_DIM, LAYERS, PAD, ragged_prompts, tiny_model

LENS = (14, 9, 4, 1)
KV_HEADS = 2
FLOAT32 = 4


def spec_of(policy: str) -> CacheSpec:
    return CacheSpec(policy=policy, budget=8, interval=3, sink=1, window=3)


def roll_out(cache: CacheSpec, max_new_tokens: int) -> Rollout:
    return generate(
        tiny_model(n_kv_heads=KV_HEADS),
        *ragged_prompts(LENS),
        cache=cache,
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        pad_token_id=PAD,
        generator=torch.Generator().manual_seed(0),
    )


def bytes_of(n_slots: int) -> int:
    """Keys and values of every layer, row and KV head."""
    return 2 * LAYERS * len(LENS) * KV_HEADS * n_slots * HEAD_DIM * FLOAT32


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bytes_are_those_of_budget_and_interval_however_long_the_response(policy: str):
    for max_new_tokens in (1, 10, 60):
        assert roll_out(spec_of(policy), max_new_tokens).kv_bytes == bytes_of(8 + 3)


def test_a_dense_cache_grows_with_the_response():
    for max_new_tokens in (1, 10, 60):
        assert roll_out(CacheSpec.dense(), max_new_tokens).kv_bytes == bytes_of(max(LENS) + max_new_tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_pools_stay_where_they_were_allocated(policy: str, monkeypatch: pytest.MonkeyPatch):
    tiny_model(n_kv_heads=KV_HEADS)  # whose preparation advances a cache of its own
    seen: dict[int, set[tuple[Any, ...]]] = {}
    advance = SlotCache.advance

    def watched(cache: SlotCache, is_running: Tensor) -> None:
        for i, layer in enumerate(cache.slot_layers):
            assert layer.pools is not None
            pools = [*(part for pool in layer.pools for part in pool.parts), layer.columns]
            seen.setdefault(i, set()).add(tuple((p.data_ptr(), tuple(p.shape)) for p in pools))
        advance(cache, is_running)

    monkeypatch.setattr(SlotCache, "advance", watched)
    roll_out(spec_of(policy), 40)
    assert len(seen) == LAYERS
    for allocations in seen.values():
        assert len(allocations) == 1
        assert all(shape[2] == 8 + 3 for _, shape in next(iter(allocations)))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_query_sees_more_keys_than_there_are_slots(policy: str):
    rollout = roll_out(spec_of(policy), 40)
    column = torch.arange(rollout.input_ids.shape[1])
    is_seen = (column[:, None] >= column) & (column[:, None] < rollout.evicted_at[..., None, :])
    # Of the queries that were decoded; the last token was not.
    n_seen = is_seen.sum(-1)[..., max(LENS) : -1]
    assert n_seen.max() == 8 + 3
    assert n_seen[0].min() == 8 + 1
