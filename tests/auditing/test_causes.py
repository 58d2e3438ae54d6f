"""Each planted fault of a log is named by the audit, and a log without one needs no explanation."""

from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch

from lit_rlkv import CacheSpec
from lit_rlkv.auditing.causes import EXACT, Audit, uneven_heads
from lit_rlkv.log_row import LogRow
from lit_rlkv.settings import Sampling
from lit_rlkv.types import NEVER
from tests.auditing.logs import BOS, SPEC, model, rows_of, sampled


def audit(backbone, rows, sampling=None, **options):
    return Audit(backbone, [LogRow(**row) for row in rows], sampling or Sampling(), **options)


@pytest.mark.parametrize("cache", [None, SPEC], ids=["dense", "evicting"])
def test_a_right_log_needs_no_explanation(cache):
    backbone = model()
    found = audit(backbone, rows_of(sampled(backbone, cache), has_record=cache is not None))
    assert found.own.gap < EXACT
    assert found.found is None


def shifted(row):
    return {**row, "logps": [*row["logps"][1:], -1.0]}


def late(row):
    """All deaths one step late, as of an engine whose scheduler is ahead."""
    times, end = torch.tensor(row["evicted_at"]), len(row["prompt_ids"]) + len(row["response_ids"])
    moved = (times + 1).clamp(max=end)
    return {**row, "evicted_at": torch.where(times == NEVER, times, moved).tolist()}


def early(row):
    """All deaths one step early."""
    times = torch.tensor(row["evicted_at"])
    own = torch.arange(times.shape[-1])
    return {**row, "evicted_at": torch.where(times == NEVER, times, (times - 1).maximum(own + 1)).tolist()}


def other_heads(row):
    return {**row, "evicted_at": torch.tensor(row["evicted_at"]).flip(1).tolist()}


def with_bos(row):
    """The engine's template writes a token that the trainer's prompt lacks."""
    return {**row, "prompt_ids": row["prompt_ids"][1:]}


def with_one_more(row):
    """The trainer's prompt has a token that the engine did not see."""
    return {**row, "prompt_ids": [5, *row["prompt_ids"]]}


def without_last(row):
    """The trainer's prompt lacks the token with which the engine's template ends."""
    return {**row, "prompt_ids": row["prompt_ids"][:-1]}


LATEST = CacheSpec("streaming", budget=19, interval=1, sink=4, window=1)
FAULTS = {
    "shift_late": (None, {}, Sampling(), shifted, "of the next token"),
    "temperature": (None, {"temperature": 0.7}, Sampling(), dict, "at temperature 0.7"),
    "top_p": (None, {"top_p": 0.9}, Sampling(), dict, "renormalised over top_p=0.9"),
    "top_k": (None, {"top_k": 20}, Sampling(), dict, "renormalised over top_k=20"),
    "top_k_then_top_p": (None, {"top_k": 30, "top_p": 0.9}, Sampling(top_k=30), dict, "top_p=0.9"),
    "min_p": (None, {"min_p": 0.2}, Sampling(min_p=0.2, temperature=0.8), dict, "at temperature 1"),
    "greedy": (None, {"temperature": 0.0}, Sampling(), dict, "of a greedy engine"),
    "raw": (None, {}, Sampling(0.7, top_p=0.95), dict, "of the raw logits"),
    "template_has_more": (None, {}, Sampling(), with_bos, "begins with token"),
    "template_has_less": (None, {}, Sampling(), with_one_more, "without its first token"),
    "template_ends_with_more": (None, {}, Sampling(), without_last, "ends with token"),
    "eviction": (LATEST, {}, Sampling(), lambda row: {**row, "evicted_at": None}, "and the latest 16 keys"),
    "death_late": (SPEC, {}, Sampling(), late, "one step less"),
    "death_early": (SPEC, {}, Sampling(), early, "one step longer"),
    "head_order": (SPEC, {}, Sampling(), other_heads, "KV head"),
}


def test_two_faults_are_named_one_after_the_other():
    backbone = model()
    rows = [shifted(row) for row in rows_of(sampled(backbone, temperature=0.7))]
    found = audit(backbone, rows)
    assert {each.cause for each in found.steps} == {
        "of the next token: they are shifted by one",
        "at temperature 0.7, not 1",
    }
    assert found.found.gap < EXACT < found.steps[0].gap


def test_temperature_and_top_p_are_found_together():
    backbone = model()
    found = audit(backbone, rows_of(sampled(backbone, temperature=0.5, top_p=0.9))).found
    assert "at temperature 0.5, not" in found.cause
    assert "top_p=0.9" in found.cause
    assert found.gap < EXACT


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    cache, options, sampling, plant, named = FAULTS[fault]
    backbone = model(bos_token_id=BOS)
    rollout = sampled(backbone, cache, first=BOS, last=BOS, **options)
    found = audit(backbone, [plant(row) for row in rows_of(rollout, has_record=cache is not None)], sampling)
    assert found.own.gap > EXACT
    assert named in found.found.cause
    assert found.found.gap < EXACT


def test_an_adapter_that_the_sampler_had_not_is_named():
    backbone = model()
    rows = rows_of(sampled(backbone))
    weight = backbone.model.layers[0].mlp.up_proj.weight.detach()
    without = weight.clone()

    @contextmanager
    def bare():
        adapted = weight.clone()
        weight.copy_(without)
        yield
        weight.copy_(adapted)

    weight.mul_(1.5)  # as an adapter does
    assert audit(backbone, rows, without_adapter=bare).found.cause == "of the model without its adapter"


def test_rounding_is_named_where_the_sampler_computed_in_16_bits():
    backbone = model()
    rows = rows_of(sampled(deepcopy(backbone).bfloat16()))
    assert "bfloat16" in audit(backbone, rows).found.cause


def test_a_learner_in_16_bits_is_compared_with_itself_in_32():
    backbone = model()
    rows = rows_of(sampled(backbone))
    found = audit(deepcopy(backbone).bfloat16(), rows).found
    assert found.cause == "of the same model in float32"


def test_responses_of_one_token_cannot_be_shifted():
    backbone = model()
    rows = [
        {name: part[:1] if name != "prompt_ids" else part for name, part in row.items()}
        for row in rows_of(sampled(backbone, temperature=0.7))
    ]
    found = audit(backbone, rows)
    assert found.found.cause.startswith("at temperature 0.7")
    assert [trial.gap for trial in found.trials] == sorted(trial.gap for trial in found.trials)
    assert not any("shifted" in trial.cause for trial in found.trials)


def test_what_nothing_explains_is_not_explained():
    backbone = model()
    rows = rows_of(sampled(backbone))
    with torch.no_grad():  # other weights than the sampler's
        backbone.model.layers[0].mlp.up_proj.weight.normal_()
    assert audit(backbone, rows).found is None


def test_a_cause_that_changes_nothing_is_none():
    backbone = model()
    assert backbone.config.vocab_size == 64
    found = audit(backbone, rows_of(sampled(backbone, temperature=0.7)))
    causes = {each.cause for each in found.trials}
    assert "renormalised over top_k=50" in causes
    assert "renormalised over top_k=100" not in causes


def drifting(row):
    """Log-probs that are further off with each token, for no reason of evictions."""
    return {**row, "logps": [logp - place for place, logp in enumerate(row["logps"])]}


@pytest.mark.parametrize("has_unlogged", [False, True])
def test_the_gap_grows_in_rows_without_a_record_alone(has_unlogged):
    backbone = model()
    first, *others = rows_of(sampled(backbone, SPEC), has_record=True)
    rows = [{**first, "evicted_at": None} if has_unlogged else first, *map(drifting, others)]
    assert audit(backbone, rows).grows == has_unlogged


def test_a_key_too_many_is_found_without_a_forward():
    (row, *_) = rows_of(sampled(model(), SPEC), has_record=True)
    assert uneven_heads(LogRow(**row)) is None
    times = torch.tensor(row["evicted_at"])
    key = int((times[1, 0] < NEVER).nonzero()[0])
    times[1, 0, key] = NEVER
    assert uneven_heads(LogRow(**{**row, "evicted_at": times.tolist()})).startswith(
        "layer 1, KV head 0 holds"
    )
