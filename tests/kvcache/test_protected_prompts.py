"""`protect_prompt`: no key of a prompt is evicted, and the budget counts the keys after it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_rlkv import generate, replay_logps
from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.experience.memory_needs import rollout_needs
from lit_rlkv.kvcache import POLICIES, CacheSpec, SlotCache
from lit_rlkv.rollout.decoder import Decoder, DecodeSettings
from lit_rlkv.settings import Sampling
from lit_rlkv.types import NEVER, Rollout
from tests.models_zoo import PAD, ragged_prompts, tiny_model
from tests.rollout.recorded import RecordedRunner
from tests.tiers import slow

LENS = (14, 9, 3, 1)
N_NEW, BUDGET, INTERVAL = 24, 8, 3
SIZES = {"budget": BUDGET, "interval": INTERVAL, "sink": 1, "window": 3}
NAMES = [name if name in ("h2o", "snapkv", "random") else slow(name) for name in POLICIES]


def run(policy: str = "snapkv", *, protect: bool = True, **changes: Any) -> Rollout:
    settings = {"max_new_tokens": N_NEW, "eos_token_id": None, "pad_token_id": PAD, **changes}
    spec = CacheSpec(policy=policy, protect_prompt=protect, **SIZES)
    generator = torch.Generator().manual_seed(0)
    return generate(tiny_model(), *ragged_prompts(LENS), cache=spec, generator=generator, **settings)


def is_prompt(rollout: Rollout) -> torch.Tensor:
    return (rollout.attention_mask & ~rollout.response_mask)[:, None, None].expand_as(rollout.evicted_at)


@pytest.mark.parametrize("policy", NAMES)
def test_prompts_stay_and_responses_are_evicted_to_the_budget(policy: str):
    rollout = run(policy)
    assert (rollout.evicted_at[is_prompt(rollout)] == NEVER).all()
    # The last query is in the step before the last token; compactions follow every third step.
    column = torch.arange(max(LENS) + N_NEW)
    is_seen = (column < rollout.evicted_at) & rollout.response_mask[:, None, None]
    for step in range(INTERVAL, N_NEW - 2, INTERVAL):
        query = max(LENS) + step
        n_held = ((rollout.evicted_at > query) & is_seen & (column < query)).sum(3)
        assert (n_held == min(step, BUDGET)).all(), step
    with torch.no_grad():
        assert (replay_logps(tiny_model(), rollout) - rollout.rollout_logps).abs().max() < 1e-4
    assert (run(policy, protect=False).evicted_at[is_prompt(rollout)] < NEVER).any()


def test_rows_that_wait_and_prompts_read_in_chunks_keep_the_same_keys():
    whole = run(temperature=0.0)
    for changes in ({"max_rows": 2}, {"prefill_chunk": 4}):
        other = run(temperature=0.0, **changes)
        assert torch.equal(other.input_ids, whole.input_ids)
        assert torch.equal(other.evicted_at, whole.evicted_at)


def test_a_step_replayed_without_its_python_keeps_the_same_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SlotCache, "n_filled", None)  # as in a graph, which reads empty slots too
    plain = run("h2o")
    monkeypatch.setattr("lit_rlkv.rollout.decoder.CudaGraphRunner", RecordedRunner)
    before = RecordedRunner.n_replays
    replayed = run("h2o")
    assert RecordedRunner.n_replays > before
    assert torch.equal(replayed.input_ids, plain.input_ids)
    assert torch.equal(replayed.evicted_at, plain.evicted_at)


def test_tokens_given_in_the_middle_of_a_response_are_no_prompt():
    device, n_given = torch.device("cpu"), 12
    settings = DecodeSettings(N_NEW + n_given, torch.tensor([], dtype=torch.long), PAD, Sampling())
    spec = CacheSpec(policy="streaming", protect_prompt=True, **SIZES)
    decoder = Decoder(tiny_model(), spec, 4, max(LENS), settings, None, cuda_graph=None)
    input_ids, mask = ragged_prompts(LENS)
    with torch.no_grad():
        decoder.prefill(range(4), input_ids, mask.bool())
        decoder.step()
        decoder.feed(range(4), torch.ones(4, n_given, dtype=torch.long), torch.ones(4, n_given) > 0)
    now = max(LENS) + 2 + n_given
    evicted = (decoder.kv.evicted_at(torch.arange(4, device=device)) == now).nonzero()[:, 3]
    # The response has two sampled tokens and the given ones; the latest eight stay.
    assert sorted(set(evicted.tolist())) == list(range(max(LENS), now - BUDGET))
    assert decoder.kv.n_live.tolist() == decoder.kv.levels.level.tolist() == [[n + BUDGET for n in LENS]]


def test_memory_is_that_of_budget_interval_and_the_longest_prompt():
    spec = CacheSpec(policy="snapkv", protect_prompt=True, **SIZES)
    n_slots = max(LENS) + BUDGET + INTERVAL
    assert spec.n_slots(100, max(LENS)) == n_slots
    assert spec.n_slots(20, max(LENS)) == 20
    assert run().kv_bytes * (BUDGET + INTERVAL) == run(protect=False).kv_bytes * n_slots
    needs, plain = (
        rollout_needs(tiny_model(), each, (4, max(LENS)), RolloutConfig(max_new_tokens=N_NEW), 1)
        for each in (spec, replace(spec, protect_prompt=False))
    )
    assert needs["KV cache"] * (BUDGET + INTERVAL) == plain["KV cache"] * n_slots


def test_a_cache_with_room_for_whole_responses_is_never_due():
    spec = CacheSpec(policy="snapkv", protect_prompt=True, budget=24, interval=3, sink=1, window=3)
    cache = SlotCache(spec, 1, 1, 14 + 24, torch.device("cpu"), n_prompt=14)
    cache.levels.start([0], [14], [14])
    assert not any(cache.levels.step() for _ in range(30))
