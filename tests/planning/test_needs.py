"""Allocations that really fail: what is said of them, with the numbers counted by hand."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import Linear

from lit_rlkv.config.schema import RolloutConfig
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.out_of_memory import MemoryExhaustedError
from lit_rlkv.planning.advice import (
    SETTINGS,
    explain_code_record,
    explain_rollout,
    explain_scoring,
    explain_update,
)
from lit_rlkv.planning.needs import rollout_needs
from tests.hand_built import ARMS, SPEC, counted_forwards, make_datamodule, make_model, make_roles

TOO_MUCH = 2**50
"""Bytes, a PiB."""
SAMPLING = RolloutConfig(n_prompts=4, max_new_tokens=10)
GROUP = 4


def use_up_memory():
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def needs(cache=SPEC, n_columns=6, **changes):
    return rollout_needs(make_model(), cache, (4, n_columns), replace(SAMPLING, **changes), GROUP)


def test_a_rollout_that_is_too_large_is_told_with_its_numbers():
    # Qwen3 with 2 layers, 2 KV heads of 8 dims, 51 tokens, float32; 16 rows of 9 slots and 16 columns
    assert needs() == {
        "KV cache": 2 * 2 * 16 * 2 * 9 * 8 * 4,
        "logits of a step": 16 * 51 * (4 + 12),
        "record of evictions": 2 * (16 + 16) * 2 * 16 * 2,
        "columns of slots": 2 * 16 * 2 * 9 * 8,
        # (3 intermediate + 4 hidden) numbers of each token of 4 prompts
        "activations of prompts": 4 * 6 * (3 * 32 + 4 * 32) * 4,
    }
    first, *lines = explain_rollout(make_model(), SPEC, (4, 6), SAMPLING, GROUP).splitlines()
    assert "4 responses of up to 10 tokens to each of 4 prompts of up to 6, cache random 7+2" in first
    assert [line.split("  ")[-1].partition(";")[0] for line in lines] == [*needs()]
    assert "36.0 KiB  KV cache; change cache.dtype, cache.budget" in lines[0]


def test_records_of_rows_that_have_ended_are_a_need_of_the_host_alone():
    model, settings = make_model(), replace(SAMPLING, max_rows=8, top_k=20, replay_routing=False)
    here = rollout_needs(model, replace(SPEC, dtype="int8"), (4, 6), settings, GROUP)
    model.to("meta")
    there = rollout_needs(model, replace(SPEC, dtype="int8"), (4, 6), settings, GROUP, torch.float32)
    for what in ("record of evictions", "record of codes"):
        assert there[what] == here[what] * 8 / (8 + 16)
    assert there["record of sampling masks, at most"] == 8 * 10 * 20 * 4
    for n_prompt, itemsize in ((65_524, 2), (65_525, 4)):  # with 10 more, to the end of 16 bits and beyond it
        long = rollout_needs(make_model(), SPEC, (4, n_prompt), settings, GROUP)["record of evictions"]
        assert long == 2 * (8 + 16) * 2 * (n_prompt + 10) * itemsize


def test_layers_with_a_window_need_no_table_to_decode():
    model = make_model()
    model.config.sliding_window, model.config.layer_types = 12, ["sliding_attention", "full_attention"]
    assert rollout_needs(model, SPEC, (4, 6), SAMPLING, GROUP)["record of evictions"] == (
        (1 * 16 + 2 * 16) * 2 * 16 * 2
    )


@pytest.mark.parametrize(
    ("arm", "max_rows", "dtype"),
    [
        *product(["shadow", "dense"], [None, 8], [None]),
        ("shadow", None, "int8"),
        ("shadow", 8, "fp8"),
        ("shadow", None, "int4"),
    ],
)
def test_the_bytes_of_the_cache_are_those_of_a_rollout(arm, max_rows, dtype):
    roles = make_roles()
    spec = replace(SPEC, dtype=dtype)
    data = make_datamodule(roles, ARMS[arm], spec, rollout={"max_rows": max_rows})
    rollout = data.collect().rollout
    n_columns = int((rollout.attention_mask & ~rollout.response_mask).sum(dim=1).max())

    def found(settings, what="KV cache"):
        return rollout_needs(roles.backbone("policy"), data.cache, (4, n_columns), settings, GROUP)[what]

    assert found(data.settings) == rollout.kv_bytes
    assert found(replace(data.settings, max_rows=4)) != rollout.kv_bytes
    if dtype is not None:  # the pools of rows have one more column each, and end tokens cut the rollout
        assert rollout.record.part_bytes["codes"] <= found(data.settings, "record of codes")
        whole = make_datamodule(roles, ARMS[arm], SPEC, rollout={"max_rows": max_rows}).collect().rollout
        assert found(data.settings, "numbers of a layer's codes") == whole.kv_bytes / 2  # of two layers


def test_a_record_of_codes_that_takes_more_than_they_save_is_told():
    # 2 layers of 2 KV heads, 16 rows of 9 slots: int8 saves 8 · 4 − (8 + 2) bytes of a key, and of a value.
    # Its record is 1 + 1 byte of each in 32 rows, and in 16 bit 1 byte and the scale's again.
    def warning(n_new: int, **changes: Any) -> str | None:
        settings = replace(SAMPLING, max_new_tokens=n_new)
        cache, asked = replace(SPEC, **changes), ((4, 6), settings, GROUP)
        both = (rollout_needs(make_model(), one, *asked) for one in (cache, replace(cache, dtype=None)))
        return explain_code_record(*both, cache, settings, 6)

    saved, of_a_column = 2 * 2 * 16 * 9 * 2 * (32 - 10), 2 * 2 * 32 * 2 * 2
    last = saved // of_a_column
    assert warning(last - 6, dtype="int8") is None
    assert f"rows of more than {last} tokens" in warning(last - 6 + 1, dtype="int8")
    assert warning(1000, dtype=None) is None
    assert warning(1000, policy="dense", dtype="int8") is None


def test_the_queries_that_a_policy_looks_at_are_a_need_of_their_own():
    sees = CacheSpec("snapkv", budget=7, interval=2, sink=1, window=4)
    assert needs(sees)["latest queries"] == 2 * 16 * 4 * 4 * 8 * 4
    for blind in (replace(sees, policy="random"), CacheSpec.dense()):
        assert "latest queries" not in needs(blind)


def test_values_weighed_by_the_output_projection_are_a_need_of_their_own():
    weighs = replace(SPEC, policy="h2o", policy_options={"value_norms": True})
    name = "values after a layer's projection"
    config = make_model().config
    heads, hidden = config.num_attention_heads, config.hidden_size
    group, weight = heads // config.num_key_value_heads, heads * config.head_dim * hidden
    few, most = needs(weighs)[name], needs(weighs, n_columns=2**16)[name]
    assert few == 4 * (16 * SPEC.n_slots(100) * group * hidden + 2 * weight)
    assert most == 4 * (2**26 + 2 * weight)
    assert name not in needs(replace(weighs, policy_options={}))


def test_what_the_sampler_keeps_is_a_need_of_its_own():
    assert not {what for what in needs() if "masks" in what}
    # 16 responses of 10 tokens, each with 20 ids of 4 bytes; 51 tokens are the whole vocabulary
    record = "record of sampling masks, at most"
    assert needs(top_k=20)[record] == 16 * 10 * 20 * 4
    assert needs(top_k=99)[record] == 16 * 10 * 51 * 4
    by_mass = needs(top_p=0.9, max_rows=8)
    # In which the bits of 32 steps of 8 rows become bytes, and bools.
    assert by_mass["logits of a step"] == 8 * 51 * 4 + 2 * 32 * 8 * 51 > 8 * 51 * (4 + 12 + 26)
    assert by_mass["bits of sampling masks"] == 32 * 8 * (51 // 8)
    found = make_datamodule(make_roles(), rollout={"top_k": 20}).collect().rollout.record.sampling_masks
    assert found.token_ids.nbytes <= needs(top_k=20)[record]


def test_the_largest_need_comes_first():
    small = CacheSpec("random", budget=2, interval=1, sink=0, window=1)
    assert next(iter(needs(small, 1))) == "logits of a step"
    assert next(iter(needs(small, 1, max_new_tokens=4000))) == "record of evictions"
    assert {*needs()} < {*SETTINGS}


@pytest.mark.parametrize(
    ("tokens_per_pass", "n_rows", "named"),
    [
        # 59 // 20 = 2 rows; more than all 16 · 20 tokens, or less than two rows of 20, would change nothing
        (59, 2, "fabric.tokens_per_pass below 59"),
        (9999, 16, "fabric.tokens_per_pass below 320"),
        (5, 1, "rollout.max_new_tokens"),
    ],
)
def test_scoring_is_told_by_what_it_reads_at_a_time(tokens_per_pass, n_rows, named):
    said = explain_scoring((16, 20), SAMPLING, tokens_per_pass)
    assert f"{n_rows} of 16 sequences of up to 20 tokens" in said
    assert named in said


@pytest.mark.parametrize("checkpoints", [False, True])
def test_an_update_is_told_by_what_it_reads_at_a_time_and_what_trains(checkpoints):
    roles = make_roles(checkpoints_layers=checkpoints)
    said = explain_update(roles, (16, 20), SAMPLING, 80)
    n = sum(p.numel() for p in roles.parameters() if p.requires_grad)
    assert f"4 of 16 sequences of up to 20 tokens at a time, and {n:,} parameters" in said
    assert "fabric.tokens_per_pass below 80" in said
    assert ("roles.gradient_checkpointing" in said) != checkpoints


def test_it_fails_where_it_is_made_to_in_a_rollout_and_another_error_is_left_alone():
    roles = make_roles()
    data = make_datamodule(roles)
    embedding = roles.backbone("policy").get_input_embeddings()
    handle = embedding.register_forward_hook(lambda *call: use_up_memory())
    with pytest.raises(MemoryExhaustedError, match="out of memory in the rollout"):
        data.collect()
    handle.remove()
    other = RuntimeError("the size of tensor a must match the size of tensor b")

    def fail(*call):
        raise other

    handle = embedding.register_forward_hook(fail)
    with pytest.raises(RuntimeError) as caught:
        data.collect()
    assert caught.value is other
    handle.remove()
    with counted_forwards(roles) as forwards:
        data.collect()
    assert forwards


def test_weights_that_are_packed_for_decoding_are_a_need(monkeypatch):
    monkeypatch.setattr("lit_rlkv.models.packed_linear.LEAST_ELEMENTS", 200)
    model = make_model()
    n_large = sum(
        m.weight.numel() for m in model.modules() if isinstance(m, Linear) and m.weight.numel() >= 200
    )
    found = rollout_needs(model, SPEC, (4, 6), SAMPLING, GROUP)
    assert found["weights packed for decoding"] == 4 * n_large > 0
