"""`budget_profile`: layers with budgets of their own, replayed exactly."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlkv import generate, replay_logps
from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.experience.memory_needs import rollout_needs
from lit_rlkv.kvcache import CacheSpec, SlotCache
from lit_rlkv.kvcache.policies import UNTRAINED
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.backbone import layer_kinds
from lit_rlkv.types import NEVER, Rollout
from tests.invariants.test_given_tokens import converse
from tests.models import test_hybrids, test_sliding_windows
from tests.models_zoo import HEAD_DIM, PAD, ragged_prompts, tiny_model
from tests.rollout.conversations import Talk
from tests.rollout.recorded import RecordedRunner
from tests.rollout.test_turns import check_tokens, talk_through
from tests.tiers import short_tier

TOLERANCE = 1e-4
LENS = (14, 9, 4, 1)
INTERVAL, BUDGETS = 3, (13, 5, 6)
SPEC = CacheSpec("snapkv", budget=8, interval=INTERVAL, sink=1, window=3, budget_profile=BUDGETS)
EVERY_POLICY = short_tier(sorted(UNTRAINED), ["h2o", "random", "snapkv", "vase"])


def run(spec: CacheSpec = SPEC, **changes: Any) -> Rollout:
    settings = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": PAD, **changes}
    generator = torch.Generator().manual_seed(0)
    return generate(tiny_model(), *ragged_prompts(LENS), cache=spec, generator=generator, **settings)


@cache
def rolled_out(policy: str) -> Rollout:
    return run(replace(SPEC, policy=policy))


def gap(rollout: Rollout, model: Any = None, **view: bool) -> float:
    with torch.no_grad():
        found = replay_logps(model or tiny_model(), rollout, **view)
    return float((found - rollout.rollout_logps).abs().max())


def n_held(rollout: Rollout, query: int) -> Tensor:
    """Keys that each layer and head still has when the query of this column has been read."""
    column = torch.arange(rollout.evicted_at.shape[-1])
    return ((rollout.evicted_at > query + 1) & (column <= query)).sum(dim=-1)


def test_budgets_match_hand_arithmetic():
    def sizes(profile, n_layers, budget=20):
        return replace(SPEC, budget=budget, budget_profile=profile).layer_budgets(n_layers)

    # Beside the 5 keys that every layer needs, 15 on average: 1.95 · 15 = 29.25, 15 and 0.05 · 15 = 0.75, of
    # which the last is nearest to a whole number.
    assert sizes("pyramid", 3) == (5 + 29, 5 + 15, 5 + 1)
    assert sizes("pyramid", 1) == (20,)
    assert sizes([26, 10, 12], 3, budget=16) == (26, 10, 12)
    assert sizes([13, 5, 6], 3, budget=16) == (26, 10, 12)
    assert sizes([1, 1, 1], 3, budget=16) == (16, 16, 16)
    assert sizes(None, 3) == (20, 20, 20)
    for n_layers in (2, 7, 30):
        found = sizes("pyramid", n_layers, budget=64)
        assert sum(found) == 64 * n_layers
        assert list(found) == sorted(found, reverse=True)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_each_layer_is_cut_back_to_its_own_budget_and_replayed_exactly(policy: str):
    rollout = rolled_out(policy)
    assert gap(rollout) < TOLERANCE
    assert gap(rollout, shadow=False) > 100 * TOLERANCE
    for step in range(0, 24 - INTERVAL, INTERVAL):
        for row, length in enumerate(LENS):
            held = n_held(rollout, max(LENS) - 1 + step)[row]
            for layer, budget in enumerate(BUDGETS):
                assert (held[layer] <= max(min(length + step, budget), 1)).all()
                if step > 0 and length > budget:
                    assert (held[layer] == budget).all()
    swapped = rollout.with_record(evicted_at=rollout.evicted_at.roll(1, dims=1))
    assert gap(swapped) > 100 * TOLERANCE  # twin: another layer's budget


@pytest.mark.parametrize("policy", ["random", "h2o", "snapkv"])
def test_equal_budgets_are_no_profile_bit_for_bit(policy: str):
    even, plain = (run(replace(SPEC, policy=policy, budget_profile=profile)) for profile in ((8, 8, 8), None))
    for name in ("input_ids", "rollout_logps", "evicted_at"):
        assert torch.equal(getattr(even, name), getattr(plain, name))
    assert even.kv_bytes == plain.kv_bytes


def test_the_bytes_are_those_of_the_budgets_and_are_estimated():
    rollout = run()
    n_slots = sum(budget + INTERVAL for budget in BUDGETS)
    assert rollout.kv_bytes == 2 * n_slots * len(LENS) * 2 * HEAD_DIM * 4
    needs = rollout_needs(tiny_model(), SPEC, (len(LENS), max(LENS)), RolloutConfig(max_new_tokens=24), 1)
    assert needs["KV cache"] == rollout.kv_bytes
    assert rollout.kv_bytes == run(replace(SPEC, budget_profile=None)).kv_bytes


def test_a_layer_with_room_for_the_whole_sequence_evicts_nothing():
    rollout = run(replace(SPEC, budget=20, budget_profile=[50, 5, 5]))
    assert (rollout.evicted_at[:, 0].masked_fill(~rollout.attention_mask[:, None], NEVER) == NEVER).all()
    assert (rollout.evicted_at[:, 1:] < NEVER).any()
    assert gap(rollout) < TOLERANCE


@pytest.mark.parametrize("policy", EVERY_POLICY)
@pytest.mark.parametrize("chunk", [None, 3])
def test_given_tokens_are_replayed_exactly(policy: str, chunk: int | None):
    rollout = converse(tiny_model("qwen3"), replace(SPEC, policy=policy), chunk)
    assert gap(rollout, tiny_model("qwen3")) < TOLERANCE


@pytest.mark.parametrize("policy", ["random", "h2o", "snapkv"])
@pytest.mark.parametrize("options", [{"max_rows": 4}, {"max_rows": 2}, {"top_k": 20}])
def test_rows_that_wait_are_resumed(policy: str, options: dict[str, int]):
    talk = Talk(max_turns=3, delay_s=0.05)
    rollout = talk_through(tiny_model("qwen3"), replace(SPEC, policy=policy), talk, **options)
    check_tokens(rollout, talk)
    assert gap(rollout, tiny_model("qwen3")) < TOLERANCE


@pytest.mark.parametrize("policy", ["random", "h2o", "snapkv"])
def test_protected_prompts_stay_beside_the_budgets(policy: str):
    rollout = run(replace(SPEC, policy=policy, protect_prompt=True))
    is_prompt = (rollout.attention_mask & ~rollout.response_mask)[:, None, None]
    assert (rollout.evicted_at.masked_fill(~is_prompt, NEVER) == NEVER).all()
    assert gap(rollout) < TOLERANCE
    held = n_held(rollout, max(LENS) - 1 + 7 * INTERVAL)
    for row, length in enumerate(LENS):
        for layer, budget in enumerate(BUDGETS):
            assert (held[row, layer] == length + budget).all()


def test_a_step_replayed_without_its_python_keeps_the_same_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SlotCache, "n_filled", None)  # as in a graph, which reads empty slots too
    plain = run()
    monkeypatch.setattr("lit_rlkv.rollout.decoder.CudaGraphRunner", RecordedRunner)
    before = RecordedRunner.n_replays
    replayed = run()
    assert RecordedRunner.n_replays > before
    assert torch.equal(replayed.input_ids, plain.input_ids)
    assert torch.equal(replayed.evicted_at, plain.evicted_at)


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_layers_with_a_state_take_a_profile(name: str):
    model = prepare_backbone(test_hybrids.hybrid(name))
    rollout = talk_through(model, replace(SPEC, budget_profile="pyramid", budget=12), Talk(delay_s=0.03))
    assert gap(rollout, model) < TOLERANCE


@pytest.mark.parametrize("family", test_sliding_windows.CASES)
def test_layers_with_a_window_are_not_in_a_profile(family: str):
    model = prepare_backbone(test_sliding_windows.windowed(family))
    spec = replace(SPEC, budget_profile="pyramid", budget=12)
    if not any(kind.in_profile for kind in layer_kinds(model)):
        with pytest.raises(ValueError, match="each layer without a window, and the model has 0"):
            talk_through(model, spec, Talk(delay_s=0.03))
        return
    for n_tokens in (60, 4):
        rollout = talk_through(model, spec, Talk(delay_s=0.03), max_new_tokens=n_tokens)
        assert gap(rollout, model) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget_profile": "cone"}, "must be pyramid, a list, .* or null, got cone"),
        ({"budget_profile": [8, 0, 8]}, r"budget_profile\[1\] must be a whole number of at least 1, got 0"),
        ({"policy": "dense", "budget_profile": "pyramid"}, "a dense cache has none; use null, or another"),
    ],
)
def test_profiles_without_meaning_are_refused(changes: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        replace(SPEC, **changes)


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ((8, 8), "must have a number for each layer without a window, and the model has 3; change it"),
        ((20, 2, 2), r"at least sink . window . 1 = 5 keys, got \[20, 2, 2\]; change it, or raise budget=8"),
    ],
)
def test_profiles_of_another_model_are_refused(profile: tuple[int, ...], says: str):
    with pytest.raises(ValueError, match=says):
        run(replace(SPEC, budget_profile=profile))


def test_a_label_names_the_profile():
    assert SPEC.label == "snapkv 13-5-6 8+3"
    assert replace(SPEC, budget_profile="pyramid", protect_prompt=True).label == "snapkv pyramid prompt+8+3"
