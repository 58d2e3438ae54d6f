"""Tests of the evictions of a rollout as actions: what the table says is what the sampler chose."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.policies import Learned
from lit_rlkv.kvcache.policy import SlotView
from lit_rlkv.models.eviction_logps import (
    KeyRecord,
    count_decisions,
    decision_logps,
    decision_scores,
    decisions_of,
    scored_layers,
)
from lit_rlkv.models.kv_scorer import kv_scorer_of
from lit_rlkv.models.packing import packed
from lit_rlkv.models.replay import response_hidden
from lit_rlkv.models.set_logps import set_logps
from lit_rlkv.rollout import generate
from lit_rlkv.types import NEVER, Rollout
from tests.models_zoo import LAYERS, PAD, ragged_prompts, tiny_model
from tests.rollouts import LENS, moved, roll_out, spec_of

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of the prompt": {"prefill_chunk": 5},
    "a protected prompt": {"protect_prompt": True},
    "a sliding window": {"family": "gemma3"},
    "one head": {"n_kv_heads": 1},
}


class Watched(Learned):
    """Keeps what it is asked: the view's columns and time, the scores without noise, and the due rows."""

    def __init__(self, seen: list[tuple[Tensor, ...]]) -> None:
        super().__init__(samples=True)
        self.seen = seen

    def score(self, view: SlotView) -> Tensor:
        noisy = super().score(view)
        assert view.now is not None
        assert view.is_due is not None
        assert view.scorer is not None
        log_age = (view.now[:, None, None] - view.columns).float().log1p()
        clean = view.scorer(view.keys, view.values, log_age[:, :, None])[:, :, 0]
        parts = (view.columns, view.is_live, view.is_recent, view.is_first, view.now, view.is_due, clean)
        self.seen.append(tuple(part.clone() for part in parts))
        return noisy


@cache
def sampled(case: str) -> tuple[Any, CacheSpec, Rollout, list[tuple[Tensor, ...]]]:
    options = dict(CASES[case])
    model = tiny_model(options.pop("family", "llama"), options.pop("n_kv_heads", 2))
    protects = options.pop("protect_prompt", False)
    seen: list[tuple[Tensor, ...]] = []
    spec = spec_of(Watched(seen), protect_prompt=protects)
    return model, spec, roll_out(model, spec, **options), seen


def learner_logps(model: Any, rollout: Rollout, spec: CacheSpec) -> tuple[Tensor, ...]:
    """Log-probs [row, layer, head, compaction] of the decisions, where they are, and their columns."""
    record, scorer = KeyRecord(), kv_scorer_of(model)
    assert scorer is not None
    with torch.no_grad():
        response_hidden(model, rollout, shadow=True, probe=record)
        found: list[list[Tensor]] = [[], [], []]
        for layer in scored_layers(model, rollout.input_ids.shape[1]):
            keys, values = record.take(layer)
            decisions = decisions_of(rollout, layer, keys.shape[1], spec)
            logps = decision_logps(decision_scores(scorer, layer, keys, values, decisions.now), decisions)
            for part, one in zip(found, (logps, decisions.is_decision, decisions.now), strict=True):
                part.append(one)
    return tuple(torch.stack(part, dim=1) for part in found)


def sampler_logps(rollout: Rollout, seen: list[tuple[Tensor, ...]], n_layers: int) -> dict[Any, float]:
    """Log-prob of each decision by row, layer, head and column, from the scores that the sampler drew by."""
    last = (torch.arange(rollout.input_ids.shape[1]) * rollout.response_mask).amax(dim=1)
    found = {}
    for number, (columns, is_live, is_recent, is_first, now, is_due, scores) in enumerate(seen):
        for row in is_due.nonzero().flatten().tolist():
            if int(now[row]) > int(last[row]) - 1:
                continue  # no query that predicted a token saw the difference
            layer = number % n_layers
            table = rollout.evicted_at[row, layer]
            for head in range(columns.shape[1]):
                is_free = (is_live & ~is_recent & ~is_first)[row, head]
                times = table[head, columns[row, head].clamp(min=0)]
                logp = set_logps(scores[row, head], times > now[row], is_free)
                found[row, layer, head, int(now[row])] = float(logp)
    return found


@pytest.mark.parametrize("case", CASES)
def test_decisions_and_their_log_probs_are_those_of_the_sampler(case: str):
    model, spec, rollout, seen = sampled(case)
    logps, is_decision, now = learner_logps(model, rollout, spec)
    layers = scored_layers(model, len(LENS) and rollout.input_ids.shape[1])
    expected = sampler_logps(rollout, seen, len(layers))
    found = {
        (row, layer, head, int(now[row, layer, number])): float(logps[row, layer, head, number])
        for row, layer, head, number in is_decision.nonzero().tolist()
    }
    assert found.keys() == expected.keys()
    assert len(found) > 30
    assert max(abs(found[key] - expected[key]) for key in found) < 1e-3
    assert min(found.values()) < -1.0  # a choice of several


def test_the_comparison_notices_evictions_at_another_time():
    model, spec, rollout, seen = sampled("plain")
    logps, is_decision, _ = learner_logps(model, moved(rollout), spec)
    expected = list(sampler_logps(rollout, seen, LAYERS).values())
    assert abs(float(logps[is_decision].sum()) - sum(expected)) > 1.0


@pytest.mark.parametrize("case", CASES)
def test_rows_without_padding_have_the_same_log_probs(case: str):
    model, spec, rollout, _ = sampled(case)
    whole, is_decision, _ = learner_logps(model, rollout, spec)
    for row in range(len(LENS)):
        alone = packed(rollout, rollout.attention_mask, torch.tensor([row]))
        found, is_own, _ = learner_logps(model, alone, spec)
        torch.testing.assert_close(found[0][is_own[0]], whole[row][is_decision[row]], rtol=1e-4, atol=1e-3)


def test_rows_that_share_a_prompt_have_the_same_log_probs():
    """The learner then computes the keys of the prompt once, on a flat sequence."""
    model, spec = sampled("plain")[:2]
    input_ids, is_prompt = ragged_prompts((12, 12))
    options = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": PAD}
    rollout = generate(model, input_ids, is_prompt, cache=spec, num_return_sequences=4, **options)
    together, is_decision, _ = learner_logps(model, rollout, spec)
    for row in range(8):
        found, _, _ = learner_logps(model, rollout.rows(slice(row, row + 1)), spec)
        torch.testing.assert_close(found[0], together[row], rtol=1e-4, atol=1e-3)
    assert is_decision.any()


@pytest.mark.parametrize("case", CASES)
def test_the_count_is_of_all_layers_and_heads(case: str):
    model, spec, rollout, _ = sampled(case)
    scorer = kv_scorer_of(model)
    assert scorer is not None
    _, is_decision, _ = learner_logps(model, rollout, spec)
    expected = is_decision.sum(dim=(1, 2, 3))
    assert torch.equal(count_decisions(rollout, model, scorer), expected)
    again = packed(rollout, rollout.attention_mask, slice(None))
    assert torch.equal(count_decisions(again, model, scorer), expected)


def test_generation_for_users_draws_nothing():
    tables = [
        roll_out(cache="learned", temperature=0.0, generator=torch.Generator().manual_seed(seed)).evicted_at
        for seed in (0, 1)
    ]
    assert torch.equal(*tables)
    assert (tables[0] < NEVER).any()
