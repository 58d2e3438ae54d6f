"""Allocations that really fail: what is said of them, with the numbers counted by hand."""

import re
from dataclasses import replace

import pytest
import torch

from lit_rlkv.data.memory import MemoryOfRL, evaluating, supervised
from lit_rlkv.data.needs import Need, explained
from lit_rlkv.data.settings import SamplingConfig, UpdateConfig
from lit_rlkv.faults import MemoryExhaustedError
from lit_rlkv.kvcache import CacheSpec
from tests.training import ARMS, SPEC, counted_forwards, make_datamodule, make_model, make_roles

TOO_MUCH = 2**50
"""Bytes, a PiB."""


def use_up_memory():
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def said(block, fail=use_up_memory):
    with pytest.raises(MemoryExhaustedError) as caught, block:
        fail()
    assert isinstance(caught.value.__cause__, RuntimeError)
    return str(caught.value)


def memory(cache=SPEC, samples_dense=False, update=None, **sampling):
    numbers = {"n_prompts": 4, "group_size": 4, "max_new_tokens": 10, "temperature": 1.0} | sampling
    config = UpdateConfig(aggregation="sequence", **(update or {}))
    return MemoryOfRL(cache, SamplingConfig(**numbers), config, samples_dense=samples_dense)


def helps(text):
    (line,) = re.findall(r"What helps, the most first: (.*)\.$", text, flags=re.M)
    return line.split("; ")


def test_needs_and_what_helps_are_in_the_order_of_their_bytes():
    small, large = Need("logits", 2048, "2 × 1024", ["a", "b"]), Need("cache", 4096, "4 × 1024", ["b", "c"])
    expected = " 4.00 KiB  cache = 4 × 1024\n   2.00 KiB  logits = 2 × 1024\n"
    for order in ([small, large], [large, small]):
        text = explained("a phase", order)
        assert expected in text
        assert helps(text) == ["b", "c", "a"]


def test_a_rollout_that_is_too_large_is_told_with_its_numbers():
    # Qwen3 with 2 layers, 2 KV heads of 8 dims, MLP 32, dim 32, 51 tokens, float32
    text = said(memory().sampling(make_roles(), 4, 6))
    assert "16 of 16 responses at a time, 4 to a prompt of 6 tokens, of up to 10 tokens" in text
    assert "cache random 7+2" in text
    for line in (
        # 2 · 2 · 16 · 2 · 9 · 8 · 4 = 36864 bytes
        "36.0 KiB  KV cache = 2 × 2 layers × 16 rows × 2 KV heads × 9 slots (7 + 2) × 8 dims × 4 bytes",
        # 2 · 16 · 2 · 9 · 8 = 4608
        "4.50 KiB  columns of the keys = 2 layers × 16 rows × 2 KV heads × 9 slots (7 + 2) × 8 bytes",
        # 2 · (16 + 16) · 2 · (6 + 10) · 4 = 8192
        "8.00 KiB  record of deaths = 2 layers × 32 rows × 2 KV heads × 16 columns × 4 bytes",
        # 16 · 51 · (4 + 16) = 16320
        "15.9 KiB  logits of a decode step = 16 rows × 51 tokens × (4 + 4 × 4) bytes",
        # 4 · 51 · 4 + 16320 = 17136
        "16.7 KiB  logits of the prefill = 4 prompts × 51 tokens × 4 bytes + 16 rows × 51 tokens × (4 + 4",
        # 4 · 6 · (4 · 32 + 2 · 32) · 4 = 18432
        "18.0 KiB  a layer of the prefill = 4 prompts × 6 tokens × (4 × 32 + 2 × 32) × 4 bytes",
    ):
        assert line in text
    assert helps(text) == [
        "lower cache.budget=7",
        "set rollout.max_rows below 16 (now null, all at once)",
        "lower rollout.max_new_tokens=10",
        "lower rollout.n_prompts=4 or algorithm.group_size=4",
    ]
    assert "The allocator: [enforce fail at alloc_cpu.cpp" in text
    assert str(TOO_MUCH) in text


@pytest.mark.parametrize("max_rows", [None, 8])
@pytest.mark.parametrize("arm", ["shadow", "dense"])
def test_the_bytes_of_the_cache_are_those_of_a_rollout(arm, max_rows):
    roles = make_roles()
    data = make_datamodule(roles, ARMS[arm], sampling={"max_rows": max_rows})
    rollout = data.collect().rollout
    n_columns = int((rollout.is_token & ~rollout.is_action).sum(dim=1).max())
    sizes = data.memory.sizes(roles.backbone("policy"), 4, n_columns)
    assert sizes.kv_bytes == rollout.kv_bytes
    assert replace(sizes, n_prompt_columns=n_columns + 1, max_rows=4).kv_bytes != rollout.kv_bytes


@pytest.mark.parametrize(
    ("cache", "samples_dense", "first"),
    [
        (SPEC, False, "lower cache.budget=7"),
        (CacheSpec.dense(), False, "set cache.policy to one that evicts, where dense keeps every key"),
        (SPEC, True, "choose a correction whose rollouts are under the cache, which this one's are not"),
    ],
)
def test_what_helps_against_a_cache_depends_on_why_it_is_large(cache, samples_dense, first):
    text = said(memory(cache, samples_dense).sampling(make_roles(), 4, 6))
    assert helps(text)[0] == first


def test_vocabularies_and_lengths_that_are_larger_than_the_cache_come_first():
    # 16 rows · 51 tokens · 20 bytes against 2 · 2 · 16 · 2 · 3 · 8 · 4 = 12288 of the cache
    small = CacheSpec("random", budget=2, interval=1, sink=0, window=1)
    assert helps(said(memory(small).sampling(make_roles(), 4, 1)))[0].startswith("set rollout.max_rows below")
    long = memory(small, max_new_tokens=4000).sampling(make_roles(), 4, 1)
    assert helps(said(long))[0] == "lower rollout.max_new_tokens=4000"


def test_one_group_at_a_time_can_only_become_smaller():
    assert "lower algorithm.group_size=4" in helps(said(memory(max_rows=6).sampling(make_roles(), 4, 6)))


def test_scoring_is_told_by_the_rows_of_a_forward():
    roles, views = make_roles(), {"policy": True, "reference": False}
    text = said(memory().scoring(roles, views, 16, 20))
    # 16 · 20 · (4 · 32 + 2 · 32) · 4 = 245760; masks of 4 heads 16 · 4 · 400 · 4 = 102400
    assert "240 KiB  activations = a layer's 16 rows × 20 tokens × (4 × 32 + 2 × 32) × 4 bytes" in text
    assert "100 KiB  masks = a layer's 16 rows × 4 heads × 20² × 4 bytes" in text
    assert helps(text)[0] == "set rollout.rows_per_pass below 16 (now null, all at once)"
    stacked = said(memory(rows_per_pass=2, stacks_passes=True).scoring(roles, views, 16, 20))
    assert "scoring, 4 rows in a forward" in stacked
    assert helps(stacked)[:2] == ["set rollout.rows_per_pass below 2 (now 2)", "set roles.stack_passes=false"]


@pytest.mark.parametrize("checkpoints_layers", [False, True])
def test_the_update_is_told_by_its_micro_batches(checkpoints_layers):
    roles = make_roles(checkpoints_layers=checkpoints_layers)
    of_run = memory(update={"n_minibatches": 2, "n_micro_batches": 2})
    with of_run.scoring(roles, {}, 16, 20):
        pass
    text = said(of_run.learning(roles))
    assert "the update, 4 rows in a micro-batch" in text
    n = sum(p.numel() for p in roles.parameters() if p.requires_grad)
    assert f"gradients and moments = 3 × {n} parameters that train" in text
    if checkpoints_layers:
        assert "inputs of layers = 2 layers × 4 rows × 20 tokens × 32 × 4 bytes" in text
    else:
        # 2 · 4 · 20 · 192 · 4 = 122880
        assert "120 KiB  activations = 2 layers × 4 rows × 20 tokens × (4 × 32 + 2 × 32) × 4 bytes" in text
    assert ("set roles.gradient_checkpointing=true" in helps(text)) is not checkpoints_layers
    assert "raise algorithm.n_micro_batches=2" in helps(text)


def test_an_evaluation_and_a_warm_up_name_their_own_settings():
    model = make_model()
    block = evaluating(model, SPEC, (64, 1), n_samples=1, max_rows=32, max_new_tokens=10)
    text = said(block)
    assert "evaluation, 32 of 64 responses at a time" in text
    assert helps(text)[:2] == ["lower cache.budget and evaluation.budgets", "lower evaluation.batch_size=32"]
    dense = evaluating(model, CacheSpec.dense(), (64, 1), n_samples=1, max_rows=32, max_new_tokens=10)
    assert helps(said(dense))[0] == "lower evaluation.batch_size=32"
    assert helps(said(supervised(model, model, 8, 20, ["lower sft.batch_size=8"]))) == [
        "lower sft.batch_size=8"
    ]


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
