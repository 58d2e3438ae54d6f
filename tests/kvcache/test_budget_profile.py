"""`budget_profile`: layers with budgets of their own, replayed exactly."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.policies import UNTRAINED
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.backbone import layer_kinds
from lit_rlkv.planning.needs import rollout_needs
from lit_rlkv.types import NEVER, Rollout
from tests.models import test_hybrids, test_sliding_windows
from tests.models_zoo import HEAD_DIM, tiny_model
from tests.rollout.conversations import Talk, talk_through
from tests.rollouts import LENS, SIZES, TOLERANCE, gap, roll_out, spec_of
from tests.tiers import short_tier

INTERVAL, BUDGETS = SIZES["interval"], (13, 5, 6)
SPEC = spec_of("snapkv", budget_profile=BUDGETS)
EVERY_POLICY = short_tier(sorted(UNTRAINED), ["h2o", "random", "snapkv", "vase"])


def run(spec: CacheSpec = SPEC, **changes: Any) -> Rollout:
    return roll_out("llama", spec, max_new_tokens=24, **changes)


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
    rollout = run(replace(SPEC, policy=policy))
    assert gap("llama", rollout) < TOLERANCE
    assert gap("llama", rollout, shadow=False) > 100 * TOLERANCE
    for step in range(0, 24 - INTERVAL, INTERVAL):
        for row, length in enumerate(LENS):
            held = n_held(rollout, max(LENS) - 1 + step)[row]
            for layer, budget in enumerate(BUDGETS):
                assert (held[layer] <= max(min(length + step, budget), 1)).all()
                if step > 0 and length > budget:
                    assert (held[layer] == budget).all()
    swapped = rollout.with_record(evicted_at=rollout.evicted_at.roll(1, dims=1))
    assert gap("llama", swapped) > 100 * TOLERANCE  # twin: another layer's budget


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
    assert gap("llama", rollout) < TOLERANCE


@pytest.mark.parametrize("policy", ["random", "h2o", "snapkv"])
def test_protected_prompts_stay_beside_the_budgets(policy: str):
    rollout = run(replace(SPEC, policy=policy, protect_prompt=True))
    is_prompt = (rollout.attention_mask & ~rollout.response_mask)[:, None, None]
    assert (rollout.evicted_at.masked_fill(~is_prompt, NEVER) == NEVER).all()
    assert gap("llama", rollout) < TOLERANCE
    held = n_held(rollout, max(LENS) - 1 + 7 * INTERVAL)
    for row, length in enumerate(LENS):
        for layer, budget in enumerate(BUDGETS):
            assert (held[row, layer] == length + budget).all()


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_layers_with_a_state_take_a_profile(name: str):
    model = prepare_backbone(test_hybrids.hybrid(name))
    rollout = talk_through(model, replace(SPEC, budget_profile="pyramid", budget=12), Talk(delay_s=0.03))
    assert gap(model, rollout) < TOLERANCE


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
        assert gap(model, rollout) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget_profile": "cone"}, "must be pyramid, a list, .* or null, got 'cone'"),
        ({"budget_profile": [8, 0, 8]}, r"budget_profile\[1\] must be a whole number of at least 1, got 0"),
        ({"policy": "dense", "budget_profile": "pyramid"}, "a dense cache has none; use null, or another"),
        (
            {"budget_profile": (8, 8)},
            "must have a number for each layer without a window, and the model has 3; change it",
        ),
        (
            {"budget_profile": (20, 2, 2)},
            r"at least sink . window . 1 = 5 keys, got \[20, 2, 2\]; change it, or raise budget=8",
        ),
    ],
)
def test_profiles_without_meaning_are_refused(changes: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        run(replace(SPEC, **changes))


def test_a_label_names_the_profile():
    assert SPEC.label == "snapkv 13-5-6 8+3"
    assert replace(SPEC, budget_profile="pyramid", protect_prompt=True).label == "snapkv pyramid prompt+8+3"
