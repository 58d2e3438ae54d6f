"""Invariant 9: slots are allocated once and never grow."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlkv.kvcache import POLICIES, SlotCache
from tests.models_zoo import HEAD_DIM, LAYERS
from tests.rollouts import LENS, roll_out

KV_HEADS = 2
FLOAT32 = 4


def bytes_of(n_slots: int) -> int:
    """Keys and values of every layer, row and KV head."""
    return 2 * LAYERS * len(LENS) * KV_HEADS * n_slots * HEAD_DIM * FLOAT32


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_of_budget_and_interval_stay_where_they_are_however_long_the_response(
    policy: str, monkeypatch: pytest.MonkeyPatch
):
    assert roll_out(cache=policy, max_new_tokens=1).kv_bytes == bytes_of(8 + 3)
    seen: dict[int, set[tuple[Any, ...]]] = {}
    advance = SlotCache.advance

    def watched(cache: SlotCache, is_running: Tensor) -> None:
        for i, layer in enumerate(cache.slot_layers):
            assert layer.pools is not None
            pools = [*(part for pool in layer.pools for part in pool.parts), layer.columns]
            seen.setdefault(i, set()).add(tuple((p.data_ptr(), tuple(p.shape)) for p in pools))
        advance(cache, is_running)

    monkeypatch.setattr(SlotCache, "advance", watched)
    rollout = roll_out(cache=policy, max_new_tokens=40)
    assert rollout.kv_bytes == bytes_of(8 + 3)
    assert len(seen) == LAYERS
    for allocations in seen.values():
        assert len(allocations) == 1
        assert all(shape[2] == 8 + 3 for _, shape in next(iter(allocations)))
    column = torch.arange(rollout.input_ids.shape[1])
    is_seen = (column[:, None] >= column) & (column[:, None] < rollout.evicted_at[..., None, :])
    # Of the queries that were decoded; the last token was not.
    n_seen = is_seen.sum(-1)[..., max(LENS) : -1]
    assert n_seen.max() == 8 + 3
    assert n_seen[0].min() == 8 + 1


def test_a_dense_cache_grows_with_the_response():
    for max_new_tokens in (1, 30):
        rollout = roll_out(cache="dense", max_new_tokens=max_new_tokens)
        assert rollout.kv_bytes == bytes_of(max(LENS) + max_new_tokens)
