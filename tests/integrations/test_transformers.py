"""`custom_generate` of transformers: its own tokens without evictions, and the record with them."""

import re

import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lit_rlkv import CacheSpec, prepare_backbone, replay_logps
from lit_rlkv import generate as sample_rollout
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.integrations.transformers import EvictingGenerateOutput, generate
from lit_rlkv.kvcache import SlotCache
from lit_rlkv.models.backbone import hidden_states, token_positions
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.types import NEVER

EVICTS = CacheSpec("snapkv", budget=8, interval=2, sink=1, window=2)


@pytest.fixture(scope="module")
def tokenizer():
    return build_task_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    model = tiny_qwen3(
        len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, hidden_size=32, num_hidden_layers=2
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return prepare_backbone(model.eval())


@pytest.fixture
def prompts(tokenizer):
    return tokenizer(["2+3=", "100+2=", "7"], return_tensors="pt", padding=True)


def sampled(model, tokenizer, prompts, **options):
    """The rollout of the public `generate` under the same cache and random numbers."""
    return sample_rollout(
        model,
        prompts.input_ids,
        prompts.attention_mask,
        cache=EVICTS,
        generator=torch.Generator().manual_seed(1),
        max_new_tokens=12,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )


def generated(model, prompts, **options):
    """What model.generate returns with our loop, the evicting cache and the random numbers of `sampled`."""
    options = {"max_new_tokens": 12, "generator": torch.Generator().manual_seed(1)} | options
    return model.generate(**prompts, custom_generate=generate, cache=EVICTS, **options)


@pytest.mark.parametrize("cache", [CacheSpec.dense(), CacheSpec("snapkv", budget=64)], ids=["dense", "large"])
def test_greedy_decoding_without_evictions_is_that_of_transformers(model, prompts, cache):
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(**prompts, **options)
    assert torch.equal(model.generate(**prompts, custom_generate=generate, cache=cache, **options), expected)
    sparse = model.generate(**prompts, custom_generate=generate, cache=EVICTS, **options)
    assert sparse.shape != expected.shape or not torch.equal(sparse, expected)


def test_the_output_holds_what_replay_needs(model, prompts):
    options = {"max_new_tokens": 20, "do_sample": True, "top_k": 0, "temperature": 0.8}
    output = generated(model, prompts, return_dict_in_generate=True, **options)
    assert isinstance(output, EvictingGenerateOutput)
    rollout = output.rollout
    assert torch.equal(output.sequences, rollout.input_ids)
    assert torch.equal(output["sequences"], output[0])
    assert ((rollout.evicted_at > 0) & (rollout.evicted_at < NEVER)).any()
    gap = (replay_logps(model, rollout, temperature=0.8) - rollout.rollout_logps).abs().max()
    dense_gap = (replay_logps(model, rollout, temperature=0.8, shadow=False) - rollout.rollout_logps).abs()
    assert gap < 1e-4
    assert dense_gap.max() > 1e-2


def test_it_samples_what_the_public_generate_samples(model, tokenizer, prompts):
    output = generated(model, prompts, num_return_sequences=3, do_sample=True, top_k=0)
    expected = sampled(model, tokenizer, prompts, num_return_sequences=3)
    assert torch.equal(output, expected.input_ids)


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, {"top_k": 50}),  # the default of transformers
        ({"top_k": 5, "temperature": 0.7}, {"top_k": 5, "temperature": 0.7}),
        ({"top_k": 0, "top_p": 0.8}, {"top_p": 0.8}),
        ({"top_k": 20, "top_p": 0.9, "min_p": 0.05}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05}),
    ],
    ids=str,
)
def test_top_k_top_p_and_min_p_reach_the_rollout(model, tokenizer, prompts, options, taken):
    output = generated(model, prompts, do_sample=True, return_dict_in_generate=True, **options)
    expected = sampled(model, tokenizer, prompts, **taken)
    assert torch.equal(output.sequences, expected.input_ids)
    masks = output.rollout.record.sampling_masks
    assert torch.equal(masks.token_ids, expected.record.sampling_masks.token_ids)
    assert 0 < int(masks.counts.max()) < len(tokenizer)
    temperature = taken.get("temperature", 1.0)
    gap = replay_logps(model, output.rollout, temperature=temperature) - output.rollout.rollout_logps
    assert gap.abs().max() < 1e-4


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_p": 0.8}], ids=str)
def test_renormalize_logits_changes_nothing(model, prompts, options):
    options = options | {"return_dict_in_generate": True}
    plain = generated(model, prompts, **options).rollout
    renormalized = generated(model, prompts, renormalize_logits=True, **options).rollout
    assert torch.equal(renormalized.input_ids, plain.input_ids)
    assert torch.equal(renormalized.rollout_logps, plain.rollout_logps)


def test_max_rows_reaches_the_rollout(model, prompts):
    options = {"do_sample": False, "return_dict_in_generate": True}
    whole, parts = (generated(model, prompts, **options, max_rows=n).rollout for n in (None, 1))
    assert parts.kv_bytes < whole.kv_bytes
    assert torch.equal(parts.input_ids, whole.input_ids)


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def filled_cache(model, prompts):
    return model(prompts.input_ids[:, :2], past_key_values=DynamicCache(), use_cache=True).past_key_values


def wrong_inputs(model, tokenizer, prompts):
    """Inputs that transformers takes and a rollout does not, by the name that the error gives."""
    texts = ["2+3=", "100+2=", "7"]
    return {
        "position_ids": {"position_ids": torch.arange(prompts.input_ids.shape[1]).expand(3, -1)},
        "past_key_values": {"past_key_values": filled_cache(model, prompts)},
        "inputs_embeds": {"inputs_embeds": model.get_input_embeddings()(prompts.input_ids)}
        | dict.fromkeys(prompts),
        "left-padded": tokenizer(texts, return_tensors="pt", padding=True, padding_side="right"),
    }


@pytest.mark.parametrize("key", ["position_ids", "past_key_values", "inputs_embeds", "left-padded"])
def test_other_inputs_are_refused_by_their_name(model, tokenizer, prompts, key):
    inputs = {**prompts} | {**wrong_inputs(model, tokenizer, prompts)[key]}
    with pytest.raises(ValueError, match=key):
        model.generate(**inputs, custom_generate=generate, cache=EVICTS, max_new_tokens=4, do_sample=False)


def processors(one):
    return {"do_sample": True, "logits_processor": LogitsProcessorList([one])}


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("cache", {"cache": None}),
        ("CacheSpec", {"cache": "snapkv"}),
        ("max_rows", {"max_rows": 4.5}),
        ("generator", {"generator": 5}),
        ("RepetitionPenalty", {"repetition_penalty": 1.2}),
        ("TypicalLogitsWarper", {"do_sample": True, "typical_p": 0.5}),
        ("MinPLogitsWarper, TopKLogitsWarper", processors(MinPLogitsWarper(0.1))),
        ("min_tokens_to_keep", processors(TopPLogitsWarper(0.9, min_tokens_to_keep=3)) | {"top_k": 0}),
        ("filter_value", processors(TopKLogitsWarper(9, filter_value=-9.0)) | {"top_k": 0}),
        ("penalty_alpha", {"do_sample": True, "penalty_alpha": 0.6, "top_k": 0}),
        ("beam_search", {"num_beams": 2}),
        ("eos_token_id and max_new_tokens", {"stopping_criteria": StoppingCriteriaList([Never()])}),
        ("cache_implementation", {"cache_implementation": "static"}),
        ("use_cache", {"use_cache": False}),
        ("output_scores", {"output_scores": True, "return_dict_in_generate": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_a_rollout_cannot_do_is_refused(model, prompts, key, options):
    options = {"cache": EVICTS, "max_new_tokens": 4, "do_sample": False} | options
    with pytest.raises(ValueError, match=re.escape(key)) as error:
        model.generate(**prompts, custom_generate=generate, **options)
    assert "\n" not in str(error.value)


def test_criteria_of_the_caller_count(model, prompts):
    n_prompt = prompts.input_ids.shape[1]
    options = {"custom_generate": generate, "cache": EVICTS, "do_sample": False}
    whole = model.generate(**prompts, max_new_tokens=12, eos_token_id=None, pad_token_id=0, **options)
    end = int(whole[0, n_prompt + 2])
    short = StoppingCriteriaList([MaxLengthCriteria(n_prompt + 5)])
    found = model.generate(
        **prompts, max_new_tokens=12, eos_token_id=None, pad_token_id=0, stopping_criteria=short, **options
    )
    assert torch.equal(found, whole[:, : n_prompt + 5])
    ends = StoppingCriteriaList([EosTokenCriteria(end)])
    options |= {"max_new_tokens": 12, "pad_token_id": 0}
    as_criterion = model.generate(**prompts, stopping_criteria=ends, **options)
    for eos in (end, torch.tensor(end), np.int64(end)):
        as_option = model.generate(**prompts, eos_token_id=eos, **options)
        assert torch.equal(as_option, as_criterion)
    assert (as_criterion[0, n_prompt + 3 :] == 0).all()
    assert torch.equal(model.generate(**prompts, eos_token_id=-1, **options), whole)  # never ends


def empty_cache(model, n_rows=3):
    return SlotCache(EVICTS, model.config.num_hidden_layers, n_rows, 64, model.device)


def prefilled_cache(model, prompts):
    """Give a cache that our own loop has filled with the prompts."""
    cache, is_prompt = empty_cache(model), prompts.attention_mask.bool()
    cache.begin(range(3), is_prompt)
    with torch.no_grad(), cache.feed(range(3), is_prompt):
        hidden_states(model, prompts.input_ids, token_positions(is_prompt), slot_cache=cache)
    return cache


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 2},
        {"prefill_chunk_size": 2},
    ],
    ids=lambda value: "-".join(value) or "greedy",
)
@pytest.mark.parametrize("attention", ["lit_rlkv", "sdpa"])
def test_the_decoding_loops_of_transformers_refuse_our_cache(model, prompts, options, attention):
    one = {name: value[:1] for name, value in prompts.items()}  # assisted decoding takes one sequence
    inputs = one if "prompt_lookup_num_tokens" in options else prompts
    try:
        model.set_attn_implementation(attention)
        with pytest.raises(ValueError, match="pass custom_generate=lit_rlkv") as error:
            model.generate(**inputs, past_key_values=empty_cache(model), max_new_tokens=4, **options)
    finally:
        model.set_attn_implementation("lit_rlkv")
    assert "\n" not in str(error.value)


def test_prefill_chunk_size_reads_prompts_in_chunks(model, prompts):
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    settings |= {"custom_generate": generate, "cache": CacheSpec("snapkv", budget=4, sink=1, window=2)}
    whole, chunked = (
        model.generate(**prompts, prefill_chunk_size=size, **settings).rollout.evicted_at
        for size in (None, 1)
    )
    n_prompt = prompts.input_ids.shape[1]
    assert not ((whole > 0) & (whole < n_prompt)).any()
    assert ((chunked > 0) & (chunked < n_prompt)).any()


def test_a_forward_that_is_not_ours_refuses_a_cache(model, prompts):
    cache, words = prefilled_cache(model, prompts), "must be decoded by lit_rlkv.generate"
    with pytest.raises(ValueError, match=words):
        model(prompts.input_ids[:, :1], past_key_values=cache)
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()  # with a mask of its own it asks for none
    with pytest.raises(ValueError, match=words):
        model(prompts.input_ids[:, :7], attention_mask=mask, past_key_values=empty_cache(model))


def test_a_model_that_was_not_prepared_is_refused(tokenizer, prompts):
    raw = tiny_qwen3(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, 32, 1)
    with pytest.raises(ValueError, match="prepare_backbone"):
        raw.generate(**prompts, custom_generate=generate, cache=EVICTS, max_new_tokens=4)
