"""Layers with a sliding window, at lengths beyond it: sampler, learner and transformers agree."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import Llama4TextConfig, MiMoV2FlashConfig

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import preparation as preparation_module
from lit_rlkv.models import prepare_backbone, replay_logps
from lit_rlkv.models.backbone import layer_kinds, within_windows
from lit_rlkv.types import Record
from tests.models_zoo import SIZE, build, own_logps, tiny_config
from tests.rollouts import gap, roll_out

N_NEW = 40
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CASES = {
    "mistral": {"sliding_window": 7},
    "gemma3": {"sliding_window": 5, "layer_types": MIXED},
    "gemma2": {"sliding_window": 6},
    "phi3": {"sliding_window": 9},
    "qwen2": {"sliding_window": 4, "use_sliding_window": True, "layer_types": MIXED},
    # Windows that do not slide: a query sees the earlier tokens of its chunk.
    "llama4": {"attention_chunk_size": 7, "no_rope_layers": [1, 0, 1]},
    # Twice as many KV heads in the layers with a window as in the others.
    "mimo_v2_flash": {"sliding_window": 5, "layer_types": MIXED},
}
SIZES = SIZE | {
    "num_hidden_layers": 3,
    "head_dim": 8,
    "num_experts_per_tok": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
OTHERS = {
    "llama4": partial(Llama4TextConfig, intermediate_size_mlp=64, num_local_experts=4),
    "mimo_v2_flash": partial(
        MiMoV2FlashConfig, v_head_dim=8, moe_intermediate_size=16, n_routed_experts=4, n_group=1, topk_group=1
    ),
}


def windowed(family, **changes):
    settings = CASES[family] | changes
    if family in OTHERS:
        return build(OTHERS[family](**SIZES, **settings))
    return build(tiny_config(family, **settings))


def window_of(family):
    return CASES[family].get("sliding_window") or CASES[family]["attention_chunk_size"]


def sampled(model, cache):
    generator = torch.Generator().manual_seed(1)
    options = {"num_return_sequences": 2, "eos_token_id": 3, "generator": generator}
    return roll_out(model, cache, max_new_tokens=N_NEW, **options)


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("policy", ["dense", "h2o"])
def test_replay_is_exact_beyond_the_window(family, policy):
    model = prepare_backbone(windowed(family))
    rollout = sampled(model, CacheSpec(policy, budget=8, interval=3, sink=1, window=2))
    assert rollout.input_ids.shape[1] > 3 * window_of(family)
    assert gap(model, rollout) < 1e-4


@pytest.mark.parametrize("family", CASES)
def test_log_probs_are_those_of_the_models_own_attention(family):
    model = windowed(family)
    rollout = sampled(prepare_backbone(windowed(family)), CacheSpec.dense())
    assert (own_logps(model, rollout) - rollout.rollout_logps[:, 1:]).abs().max() < 1e-4


def test_a_window_off_by_one_or_none_at_all_is_another_function():
    model = prepare_backbone(windowed("mistral"))
    rollout = sampled(model, CacheSpec.dense())
    for window in (6, 8, 1000):
        model.config.sliding_window = window
        assert gap(model, rollout, shadow=False) > 1e-2
    model.config.sliding_window = 7
    assert gap(model, rollout, shadow=False) < 1e-4


def test_a_policy_evicts_in_the_full_layers_alone_and_windows_are_rings():
    model = prepare_backbone(windowed("gemma3"))
    spec = CacheSpec("random", budget=9, interval=3, sink=1, window=2)
    rollout = sampled(model, spec)
    column = torch.arange(rollout.input_ids.shape[1])
    dead = rollout.evicted_at < 2**30
    for layer in (0, 2):
        is_dead = dead[:, layer] & rollout.attention_mask[:, None]
        expected = (column + 5).expand_as(rollout.evicted_at[:, layer])
        assert torch.equal(rollout.evicted_at[:, layer][is_dead], expected[is_dead].int())
        assert is_dead.any()
    assert not torch.equal(rollout.evicted_at[:, 1], rollout.evicted_at[:, 0])
    n_rows, n_kv_heads, dim = len(rollout.input_ids), 2, 8
    assert rollout.kv_bytes == 2 * n_rows * n_kv_heads * dim * 4 * (5 + (9 + 3) + 5)


def test_a_row_of_a_layer_with_chunks_dies_whole_at_the_next_chunk():
    model = prepare_backbone(windowed("llama4"))
    rollout = sampled(model, CacheSpec("random", budget=9, interval=3, sink=1, window=2))
    first = rollout.attention_mask.int().argmax(dim=1, keepdim=True)
    column = torch.arange(rollout.input_ids.shape[1])
    ends = first + ((column - first) // 7 + 1) * 7
    last = (column * rollout.attention_mask).amax(dim=1, keepdim=True)
    is_dead = (ends < last) & rollout.attention_mask  # a last token is no query
    for layer in (0, 2):
        for evicted_at in rollout.evicted_at[:, layer].unbind(1):
            assert torch.equal(evicted_at[is_dead], ends[is_dead].int())
    assert gap(model, rollout, shadow=False) > 1e-2


def test_heads_of_a_layer_with_fewer_of_them_stand_repeated_in_the_table():
    model = prepare_backbone(windowed("mimo_v2_flash"))
    rollout = sampled(model, CacheSpec("random", budget=9, interval=3, sink=1, window=2))
    full, n_rows, dim = rollout.evicted_at[:, 1], len(rollout.input_ids), 8
    assert full.shape[1] == 4
    assert torch.equal(full[:, 0], full[:, 1])
    assert not torch.equal(full[:, 0], full[:, 2])
    assert rollout.kv_bytes == 2 * n_rows * dim * 4 * (4 * 5 + 2 * (9 + 3) + 4 * 5)
    swapped = rollout.evicted_at.clone()
    swapped[:, 1] = full.flip(1)
    assert gap(model, rollout.with_record(evicted_at=swapped)) > 1e-2


def test_a_window_wider_than_the_sequence_changes_nothing():
    plain = sampled(prepare_backbone(windowed("mistral", sliding_window=None)), CacheSpec.dense())
    wide = prepare_backbone(windowed("mistral", sliding_window=100))
    assert torch.equal(sampled(wide, CacheSpec.dense()).input_ids, plain.input_ids)
    table = Record.dense(plain.attention_mask).evicted_at
    assert within_windows(wide, table) is table


def test_gradients_are_those_of_the_models_own_attention():
    own, ours = windowed("mistral"), prepare_backbone(windowed("mistral"))
    rollout = sampled(ours, CacheSpec.dense())
    replay_logps(ours, rollout, shadow=False).sum().backward()
    own_logps(own, rollout).sum().backward()
    for (name, one), (_, other) in zip(own.named_parameters(), ours.named_parameters(), strict=True):
        error = (one.grad - other.grad).abs().max() / one.grad.abs().max().clamp(min=1e-6)
        assert error < 1e-3, name


@pytest.mark.parametrize("family", CASES)
def test_loading_proves_the_window_and_catches_one_that_is_off_by_one(family, monkeypatch):
    kinds = layer_kinds(prepare_backbone(windowed(family)))
    assert {kind.window for kind in kinds if kind.window} == {window_of(family)}

    def wrong(model):
        return [replace(kind, window=kind.window and kind.window + 1) for kind in layer_kinds(model)]

    monkeypatch.setattr("lit_rlkv.models.backbone.layer_kinds", wrong)
    monkeypatch.setattr(preparation_module, "layer_kinds", wrong)
    with pytest.raises(ValueError, match="cannot be replayed"):
        prepare_backbone(windowed(family))
