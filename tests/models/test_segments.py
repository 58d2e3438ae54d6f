"""Whole replays with attention in segments: gaps, and gradients equal to those under lists."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.kernels.shadow_attention import (
    flash,
    segment_plan,
    set_shadow_attention,
    use_shadow_attention,
)
from lit_rlkv.kvcache import POLICIES, CacheSpec
from lit_rlkv.models import attention, prepare_backbone, replay_logps
from lit_rlkv.models.activations import checkpoint_layers, checkpointing
from lit_rlkv.models.flat_tokens import FlatTokens
from lit_rlkv.rollout import generate
from lit_rlkv.types import Rollout
from tests.kernels.segment_cases import PlainLibrary
from tests.models.test_attention_sinks import gpt_oss
from tests.models.test_hybrids import hybrid
from tests.models.test_sliding_windows import windowed
from tests.models_zoo import PAD, build, ragged_prompts, tiny_config, tiny_model
from tests.rollout.conversations import Talk
from tests.tiers import short_tier

SIZES: dict[str, Any] = {"budget": 8, "interval": 3, "sink": 1, "window": 3}
TURNS: dict[str, Any] = {"conversations": Talk(), "eos_token_id": (5, 6, 7, 8)}
RECORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{policy: ({"policy": policy}, {}) for policy in sorted(POLICIES)},
    "interval 1": ({"interval": 1}, {}),
    "no evictions": ({"budget": 200}, {}),
    "evictions in some rows": ({"budget": 40}, {}),
    "protected prompts": ({"protect_prompt": True}, {}),
    "budgets of layers": ({"budget": 12, "budget_profile": [24, 16, 8]}, {}),
    "chunks": ({}, {"prefill_chunk": 5}),
    "turns, chunks, protected": ({"protect_prompt": True}, TURNS | {"prefill_chunk": 4}),
    "int8": ({"dtype": "int8"}, {}),
    "continuous batching": ({}, {"max_rows": 2}),
    "a prompt each": ({}, {"num_return_sequences": 1}),
}
"""Changes of the cache and of the rollout."""
FAMILIES = {
    "gemma3": lambda: windowed("gemma3"),
    "phi3": lambda: windowed("phi3"),
    "llama4": lambda: windowed("llama4"),
    "mimo_v2_flash": lambda: windowed("mimo_v2_flash"),
    "gpt_oss": gpt_oss,
    "deepseek_v3": lambda: build(tiny_config("deepseek_v3")),
    "qwen3_5": lambda: hybrid("qwen3_5"),
}


@pytest.fixture(autouse=True)
def short_segments_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_plan, "MIN_QUERIES", 1)
    monkeypatch.setattr(segment_plan, "MAX_OLD", 10**9)


@pytest.fixture
def n_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the layers that are computed in segments."""
    calls, attend = [0], attention.segment_attention

    def counted(*args):
        calls[0] += 1
        return attend(*args)

    monkeypatch.setattr(attention, "segment_attention", counted)
    return calls


def sample(model: Any, spec: CacheSpec, **options: Any) -> Rollout:
    """Two responses to each of four left-padded prompts, some of which end early."""
    settings = {"max_new_tokens": 40, "eos_token_id": (3, 5), "num_return_sequences": 2}
    generator = torch.Generator().manual_seed(1)
    return generate(
        model,
        *ragged_prompts((31, 22, 9, 1)),
        cache=spec,
        pad_token_id=PAD,
        generator=generator,
        **settings | options,
    )


def replayed(model: Any, rollout: Rollout) -> tuple[float, torch.Tensor]:
    """Return the largest gap of a replay, and the gradient of a sum that weighs each token differently."""
    model.zero_grad()
    logps = replay_logps(model, rollout)
    (logps * torch.linspace(-1, 1, logps.numel()).view_as(logps)).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return float((logps - rollout.rollout_logps).detach().abs().max()), gradient


def check_segments(model: Any, rollout: Rollout) -> None:
    gap, expected = replayed(model, rollout)
    with use_shadow_attention("segments"):
        found_gap, found = replayed(model, rollout)
    assert max(gap, found_gap) < 2e-6
    assert (found - expected).norm() < 2e-6 * expected.norm()


@pytest.mark.parametrize("record", short_tier(RECORDS, ["h2o", "random", *[*RECORDS][len(POLICIES) :]]))
def test_records_of_every_kind_replay_in_segments(record, n_calls):
    changes, options = RECORDS[record]
    model = tiny_model()
    check_segments(model, sample(model, CacheSpec(**{"policy": "snapkv"} | SIZES | changes), **options))
    assert n_calls == [len(model.base_model.layers)]


@pytest.mark.parametrize("n_kv_heads", [1, 4])
def test_any_number_of_kv_heads_replays(n_kv_heads, n_calls):
    model = tiny_model(n_kv_heads=n_kv_heads)
    check_segments(model, sample(model, CacheSpec("h2o", **SIZES)))
    assert n_calls[0] > 0


@pytest.mark.parametrize("family", short_tier(FAMILIES, ["gemma3", "gpt_oss", "llama4"]))
@pytest.mark.parametrize("has_windows", [True, False])
def test_windows_sinks_states_and_other_widths_replay(family, has_windows, n_calls, monkeypatch):
    """Under a library that has windows, and under that of the CPU, which leaves their layers to blocks."""
    if has_windows:
        monkeypatch.setitem(flash.LIBRARIES, "cpu", PlainLibrary())
    model = prepare_backbone(FAMILIES[family]())
    options = {"record_routing": True} if family in ("gpt_oss", "deepseek_v3") else {}
    check_segments(model, sample(model, CacheSpec("h2o", **SIZES), **options))
    assert n_calls[0] > 0 or not has_windows


def test_a_shared_prompt_is_not_copied_for_its_responses(monkeypatch):
    model = tiny_model()
    rollout = sample(model, CacheSpec("h2o", **SIZES))

    def refuse(self, *args):
        raise AssertionError("attention on rows")

    monkeypatch.setattr(FlatTokens, "attend", refuse)
    with pytest.raises(AssertionError, match="on rows"):
        replayed(model, rollout)
    monkeypatch.setitem(flash.LIBRARIES, "cpu", library := PlainLibrary())
    with use_shadow_attention("segments"):
        replayed(model, rollout)
    own = [call for call in library.calls if call.window == 0]
    n_own = sum(int(call.query_starts[-1]) for call in own) / len(model.base_model.layers)
    # Each token but the last of a row is a query of each KV head once.
    n_responses = int((rollout.response_mask[:, 1:] & rollout.response_mask[:, :-1]).sum())
    assert n_own == 2 * (31 + 22 + 9 + 1 + n_responses)


def test_a_record_one_column_late_is_found():
    model = tiny_model()
    rollout = sample(model, CacheSpec("h2o", **SIZES))
    late = rollout.evicted_at.clamp(max=2**31 - 2) + 1
    with use_shadow_attention("segments"):
        gap, _ = replayed(model, replace(rollout, record=replace(rollout.record, evicted_at=late)))
    assert gap > 1e-2


def test_checkpointed_layers_are_recomputed_in_segments():
    model = tiny_model()
    rollout = sample(model, CacheSpec("h2o", **SIZES))
    checkpoint_layers(model)
    with use_shadow_attention("segments"), checkpointing(model, True):
        _, found = replayed(model, rollout)
    with checkpointing(model, True):
        _, expected = replayed(model, rollout)
    assert (found - expected).norm() < 2e-6 * expected.norm()


def test_a_method_that_is_none_is_refused():
    with pytest.raises(ValueError, match="one of lists, segments, got 'blocks'"):
        set_shadow_attention("blocks")


def test_softcaps_definitions_and_short_segments_take_what_there_is(n_calls, monkeypatch):
    spec = CacheSpec("h2o", **SIZES)
    capped, plain = prepare_backbone(build(tiny_config("gemma2"))), tiny_model()
    check_segments(capped, sample(capped, spec))
    rollout = sample(plain, spec)
    with use_kernels("reference"):
        check_segments(plain, rollout)
    monkeypatch.setattr(segment_plan, "MIN_QUERIES", 16)
    check_segments(plain, rollout)
    assert n_calls == [0]
