"""`protect_prompt`: no key of a prompt is evicted, and the budget counts the keys after it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.kvcache import POLICIES, SlotCache
from lit_rlkv.planning.needs import rollout_needs
from lit_rlkv.rollout.decoder import Decoder, DecodeSettings
from lit_rlkv.settings import Sampling
from lit_rlkv.types import NEVER, Rollout
from tests.models_zoo import PAD, ragged_prompts, tiny_model
from tests.rollouts import LENS, SIZES, TOLERANCE, gap, roll_out, spec_of
from tests.tiers import short_tier

N_NEW = 24
BUDGET, INTERVAL = SIZES["budget"], SIZES["interval"]
NAMES = short_tier(POLICIES, ["h2o", "snapkv", "random"])


def run(policy: str = "snapkv", *, protect: bool = True, **changes: Any) -> Rollout:
    return roll_out("llama", spec_of(policy, protect_prompt=protect), LENS, max_new_tokens=N_NEW, **changes)


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
    assert gap("llama", rollout) < TOLERANCE
    assert (run(policy, protect=False).evicted_at[is_prompt(rollout)] < NEVER).any()


def test_rows_that_wait_and_prompts_read_in_chunks_keep_the_same_keys():
    whole = run(temperature=0.0)
    for changes in ({"max_rows": 2}, {"prefill_chunk": 4}):
        other = run(temperature=0.0, **changes)
        assert torch.equal(other.input_ids, whole.input_ids)
        assert torch.equal(other.evicted_at, whole.evicted_at)


def test_tokens_given_in_the_middle_of_a_response_are_no_prompt():
    device, n_given = torch.device("cpu"), 12
    settings = DecodeSettings(N_NEW + n_given, torch.tensor([], dtype=torch.long), PAD, Sampling())
    spec = spec_of("streaming", protect_prompt=True)
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
    spec = spec_of("snapkv", protect_prompt=True)
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
    spec = spec_of("snapkv", protect_prompt=True, budget=24)
    cache = SlotCache(spec, 1, 1, 14 + 24, torch.device("cpu"), n_prompt=14)
    cache.levels.start([0], [14], [14])
    assert not any(cache.levels.step() for _ in range(30))
