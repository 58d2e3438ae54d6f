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


@pytest.mark.parametrize("cache", [CacheSpec.dense(), CacheSpec("snapkv", budget=64)], ids=["dense", "large"])
def test_greedy_decoding_without_evictions_is_that_of_transformers(model, prompts, cache):
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(**prompts, **options)
    assert torch.equal(model.generate(**prompts, custom_generate=generate, cache=cache, **options), expected)
    sparse = model.generate(**prompts, custom_generate=generate, cache=EVICTS, **options)
    assert sparse.shape != expected.shape or not torch.equal(sparse, expected)


def test_the_output_holds_what_replay_needs(model, prompts):
    output = model.generate(
        **prompts,
        custom_generate=generate,
        cache=EVICTS,
        max_new_tokens=20,
        do_sample=True,
        top_k=0,
        temperature=0.8,
        return_dict_in_generate=True,
    )
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
    output = model.generate(
        **prompts,
        custom_generate=generate,
        cache=EVICTS,
        generator=torch.Generator().manual_seed(1),
        max_new_tokens=12,
        num_return_sequences=3,
        do_sample=True,
        top_k=0,
    )
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
    output = model.generate(
        **prompts,
        custom_generate=generate,
        cache=EVICTS,
        generator=torch.Generator().manual_seed(1),
        max_new_tokens=12,
        do_sample=True,
        return_dict_in_generate=True,
        **options,
    )
    expected = sampled(model, tokenizer, prompts, **taken)
    assert torch.equal(output.sequences, expected.input_ids)
    masks = output.rollout.sampling_masks
    assert torch.equal(masks.token_ids, expected.sampling_masks.token_ids)
    assert 0 < int(masks.counts.max()) < len(tokenizer)
    temperature = taken.get("temperature", 1.0)
    gap = replay_logps(model, output.rollout, temperature=temperature) - output.rollout.rollout_logps
    assert gap.abs().max() < 1e-4


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_p": 0.8}], ids=str)
def test_renormalize_logits_changes_nothing(model, prompts, options):
    def rollout(**more):
        return model.generate(
            **prompts,
            custom_generate=generate,
            cache=EVICTS,
            generator=torch.Generator().manual_seed(1),
            max_new_tokens=12,
            return_dict_in_generate=True,
            **options | more,
        ).rollout

    plain, renormalized = rollout(), rollout(renormalize_logits=True)
    assert torch.equal(renormalized.input_ids, plain.input_ids)
    assert torch.equal(renormalized.rollout_logps, plain.rollout_logps)


def test_max_rows_reaches_the_rollout(model, prompts):
    options = {"custom_generate": generate, "cache": EVICTS, "max_new_tokens": 8, "do_sample": False}
    options["return_dict_in_generate"] = True
    whole, parts = (model.generate(**prompts, **options, max_rows=n).rollout for n in (None, 1))
    assert parts.kv_bytes < whole.kv_bytes
    assert torch.equal(parts.input_ids, whole.input_ids)


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def filled_cache(model, prompts):
    return model(prompts.input_ids[:, :2], past_key_values=DynamicCache(), use_cache=True).past_key_values


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache": None}, "cache must be given to model.generate"),
        ({"cache": "snapkv"}, "cache must be a CacheSpec, got 'snapkv'; give CacheSpec("),
        ({"max_rows": 4.5}, "max_rows must be a whole number"),
        ({"generator": 5}, "generator must be a torch.Generator or None, got 5"),
        (
            {"repetition_penalty": 1.2},
            "replays no other change. Options that the call does not set are those of model.generation",
        ),
        ({"do_sample": True, "typical_p": 0.5}, "got TopKLogitsWarper, TypicalLogitsWarper"),
        (
            {"do_sample": True, "logits_processor": LogitsProcessorList([MinPLogitsWarper(0.1)])},
            "each at most once and in this order, got MinPLogitsWarper, TopKLogitsWarper",
        ),
        (
            {"logits_processor": LogitsProcessorList([TopPLogitsWarper(0.9, min_tokens_to_keep=3)])},
            "min_tokens_to_keep must be 1",
        ),
        (
            {"logits_processor": LogitsProcessorList([TopKLogitsWarper(9, filter_value=-9.0)])},
            "filter_value -inf",
        ),
        ({"do_sample": True, "penalty_alpha": 0.6, "top_k": 0}, "penalty_alpha must be left out"),
        ({"num_beams": 2}, "generation must be greedy or sampling, got beam_search"),
        ({"stopping_criteria": StoppingCriteriaList([Never()])}, "must be eos_token_id and max_new_tokens"),
        ({"cache_implementation": "static"}, "cache_implementation must be left out, got 'static'"),
        ({"use_cache": False}, "use_cache must be True"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores must be left out"),
        ({"position_ids": torch.arange(7).expand(3, -1)}, "position_ids must be left out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_a_rollout_cannot_do_is_refused(model, prompts, options, words):
    options = {"cache": EVICTS, "max_new_tokens": 4, "do_sample": False} | options
    if "position_ids" in options:
        options["position_ids"] = torch.arange(prompts.input_ids.shape[1]).expand(3, -1)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
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


def test_embeddings_are_refused_by_their_name(model, prompts):
    embeddings = model.get_input_embeddings()(prompts.input_ids)
    with pytest.raises(ValueError, match="inputs_embeds must be left out: a rollout takes input_ids"):
        model.generate(inputs_embeds=embeddings, custom_generate=generate, cache=EVICTS, max_new_tokens=4)


def test_right_padded_prompts_are_refused_with_the_side_to_choose(model, tokenizer):
    texts = ["2+3=", "100+2=", "7"]
    prompts = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    words = "prompts must be left-padded, got an attention_mask with 0 in the last column"
    with pytest.raises(ValueError, match=words):
        model.generate(**prompts, custom_generate=generate, cache=EVICTS, max_new_tokens=4, do_sample=False)


def test_a_filled_cache_is_refused(model, prompts):
    with pytest.raises(ValueError, match="past_key_values must be empty"):
        model.generate(
            **prompts,
            custom_generate=generate,
            cache=EVICTS,
            past_key_values=filled_cache(model, prompts),
            max_new_tokens=4,
            do_sample=False,
        )


def empty_cache(model, n_rows=3):
    return SlotCache(EVICTS, model.config.num_hidden_layers, n_rows, 64, model.device)


def prefilled_cache(model, prompts):
    """Give a cache that our own loop has filled with the prompts."""
    cache, is_prompt = empty_cache(model), prompts.attention_mask.bool()
    with torch.no_grad(), cache.prefill(range(3), is_prompt):
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


def test_a_forward_that_is_not_ours_refuses_a_cache(model, prompts):
    cache, words = prefilled_cache(model, prompts), "must be decoded by lit_rlkv.generate"
    with pytest.raises(ValueError, match=words):
        model(prompts.input_ids[:, :1], past_key_values=cache)
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()  # with a mask of its own it asks for none
    with pytest.raises(ValueError, match=words):
        model(prompts.input_ids[:, :7], attention_mask=mask, past_key_values=empty_cache(model))


def test_a_model_that_was_not_prepared_is_refused(tokenizer, prompts):
    raw = tiny_qwen3(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, 32, 1)
    with pytest.raises(ValueError, match="pass the model through prepare_backbone first"):
        raw.generate(**prompts, custom_generate=generate, cache=EVICTS, max_new_tokens=4)
