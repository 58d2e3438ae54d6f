from typing import Any

import decode_steps
import pytest
import torch

from lit_rlkv.kvcache import CacheSpec, SlotCache
from lit_rlkv.rollout import decoder
from tests.models_zoo import HEAD_DIM, LAYERS
from tests.rollout.test_decoder import LENS, run, stops
from tests.rollout.test_ended_rows import read_by

SLOT_BYTES = 2 * LAYERS * 2 * HEAD_DIM * 4
"""Keys and values of a token, in two KV heads, float32."""
SPEC = CacheSpec("streaming", budget=64, interval=32, sink=1, window=3)


@pytest.mark.parametrize("max_rows", [None, 2])
def test_the_counts_are_those_of_a_real_rollout(max_rows: int | None, monkeypatch: pytest.MonkeyPatch):
    settings: dict[str, Any] = {"eos_token_id": stops(run()), "max_rows": max_rows}
    evict, n_evictions = SlotCache.evict, 0

    def watched(cache: SlotCache) -> None:
        nonlocal n_evictions
        n_evictions += 1
        evict(cache)

    monkeypatch.setattr(SlotCache, "evict", watched)
    rollout, slots = read_by(monkeypatch, "snapkv", **settings)
    spec = CacheSpec("snapkv", budget=8, interval=3, sink=1, window=3)
    lengths = rollout.response_mask.sum(dim=1)
    found = decode_steps.count(torch.tensor(LENS), lengths, spec, max_rows or len(LENS), check_every=1)
    assert (found.steps, found.evicting, found.read) == (len(slots), n_evictions, int(slots.sum()))
    assert found.read < found.kept


@pytest.mark.parametrize("max_rows", [None, 2])
def test_a_dense_cache_has_as_many_slots_as_counted(max_rows: int | None, monkeypatch: pytest.MonkeyPatch):
    for module in (decoder, decode_steps):
        monkeypatch.setattr(module, "FIRST_TOKENS", 3)
    settings: dict[str, Any] = {"eos_token_id": stops(run("dense")), "max_rows": max_rows}
    rollout = run("dense", **settings)
    lengths, n_rows = rollout.response_mask.sum(dim=1), max_rows or len(LENS)
    found = decode_steps.count(torch.tensor(LENS), lengths, CacheSpec.dense(), n_rows, check_every=1)
    assert rollout.kv_bytes == found.grown * SLOT_BYTES
    assert 0 < found.used <= found.grown


def random_lengths(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(8, 64, (n,), generator=draw), torch.randint(64, 400, (n,), generator=draw)


def test_rows_that_start_together_evict_in_one_step_of_an_interval():
    full, clock = (decode_steps.count(*random_lengths(64), SPEC, 64, when_full=b) for b in (True, False))
    assert clock.evicting <= clock.steps // SPEC.interval < full.evicting // 10


def test_refilled_rows_evict_in_as_many_steps_of_an_interval_as_there_are_checks():
    found = decode_steps.count(*random_lengths(64), SPEC, 16)
    assert found.evicting <= 2 * (found.steps // SPEC.interval + 1)
    at_once = decode_steps.count(*random_lengths(64), SPEC, 16, check_every=1)
    assert at_once.evicting > 3 * found.evicting


def test_a_short_interval_puts_all_refilled_rows_on_one_clock():
    spec = CacheSpec("streaming", budget=64, interval=5, sink=1, window=3)
    found = decode_steps.count(*random_lengths(64), spec, 16)
    assert found.evicting <= found.steps // 5 + 1
