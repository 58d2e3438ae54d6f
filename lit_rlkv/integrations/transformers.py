"""Rollouts under a KV cache of fixed size through `generate` of transformers, by its `custom_generate`.

    from lit_rlkv.integrations.transformers import generate

    output = model.generate(
        **inputs, custom_generate=generate, cache=CacheSpec("snapkv", budget=512),
        do_sample=True, top_p=0.9, max_new_tokens=256, return_dict_in_generate=True,
    )

`output.rollout` then holds the table of evicted keys and the tokens that the sampler chose from, for
`replay_logps`.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.backbone import token_positions
from lit_rlkv.rollout import generate as sample_rollout
from lit_rlkv.types import Rollout

_IGNORED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
"""Arguments that transformers prepares for its own decoding loop; given ones are checked."""
_WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
"""Changes of the logits that can be replayed, in transformers' order, and the names of their numbers."""
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass
class EvictingGenerateOutput(GenerateDecoderOnlyOutput):
    """GenerateDecoderOnlyOutput with the rollout: sequences, log-probs, and the table of evicted keys."""

    rollout: Rollout | None = None


def generate(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch prompt"],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    cache: CacheSpec | None = None,
    generator: torch.Generator | None = None,
    max_rows: int | None = None,
    **model_kwargs: Any,
) -> EvictingGenerateOutput | Tensor:
    """Decode greedily or sample under an evicting cache; to be passed as `custom_generate`.

    transformers calls it with the first five arguments. With `prefill_chunk_size` in the generation config a
    prompt is read in chunks, each under the budget. The other arguments go to `model.generate`:

    Args:
        cache: size and policy of the cache; required.
        generator: random numbers on the model's device; None: torch's default generator.
        max_rows: most sequences to decode at a time; None: all at once.

    A `streamer` gets the prompt alone: transformers hands it to its own decoding loops only.

    Returns:
        The sequences, or with `return_dict_in_generate=True` an `EvictingGenerateOutput`.

    Raises:
        ValueError: `cache` is missing, the model did not pass `prepare_backbone`, or the generation config
            asks for what the rollout cannot do or the learner cannot replay.
    """
    if cache is None:
        raise ValueError("cache must be given to model.generate; pass cache=CacheSpec('snapkv', budget=512)")
    _check(generation_config, logits_processor, stopping_criteria)
    attention_mask = _check_model_kwargs(input_ids, model_kwargs)
    n = generation_config.num_return_sequences or 1
    # transformers has made them of its options, and a criterion of the caller takes the place of its own.
    ends = [each.eos_token_id for each in stopping_criteria if isinstance(each, EosTokenCriteria)]
    listed = torch.cat([each.flatten() for each in ends]).tolist() if ends else []
    eos = [token for token in listed if token >= 0] or None  # none is negative: transformers then never ends
    lengths = [each.max_length for each in stopping_criteria if isinstance(each, MaxLengthCriteria)]
    pad = generation_config.pad_token_id
    pad = int(pad) if pad is not None else eos[0] if eos else 0  # as transformers does
    rollout = sample_rollout(
        model,
        input_ids[::n],  # transformers has repeated each prompt
        attention_mask[::n],
        cache=cache,
        max_new_tokens=min(generation_config.max_length, *lengths) - input_ids.shape[1],
        eos_token_id=eos,
        pad_token_id=pad,
        **(_sampling(logits_processor) if generation_config.do_sample else {"temperature": 0.0}),
        generator=generator,
        num_return_sequences=n,
        max_rows=max_rows,
        prefill_chunk=generation_config.prefill_chunk_size,
    )
    if not generation_config.return_dict_in_generate:
        return rollout.input_ids
    return EvictingGenerateOutput(sequences=cast(torch.LongTensor, rollout.input_ids), rollout=rollout)


def _check(config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"generation must be greedy or sampling, got {mode.value}; the record of evictions has one "
            "sequence per row"
        )
    # Log-probs are normalised with and without `renormalize_logits`.
    kinds = [type(each) for each in processors if not isinstance(each, LogitNormalization)]
    if kinds != [kind for kind in _WARPERS if kind in kinds]:
        given = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(
            "logits must be changed by temperature, top_k, top_p and min_p alone, each at most once and in "
            f"this order, got {given}; the learner replays no other change. Options that the call does not "
            "set are those of model.generation_config; disable one by its neutral value, such as "
            "repetition_penalty=1.0"
        )
    known = (EosTokenCriteria, MaxLengthCriteria)
    names = [type(each).__name__ for each in criteria if not isinstance(each, known)]
    if names:
        raise ValueError(f"stopping criteria must be eos_token_id and max_new_tokens, got {', '.join(names)}")
    if config.cache_implementation is not None:
        raise ValueError(
            f"cache_implementation must be left out, got {config.cache_implementation!r}; use `cache`"
        )
    # Of transformers' own warpers; top-k keeps at least as many tokens anyway.
    kept = [getattr(each, "min_tokens_to_keep", 1) for each in processors]
    filled = [getattr(each, "filter_value", -math.inf) for each in processors]
    if any(n != 1 for n in kept) or any(value != -math.inf for value in filled):
        raise ValueError(
            "min_tokens_to_keep must be 1 and filter_value -inf in each logits processor, as the "
            "sampler has them; leave them out"
        )
    if getattr(config, "penalty_alpha", None):
        raise ValueError(
            f"penalty_alpha must be left out, got {config.penalty_alpha}: contrastive search is no sampling"
        )
    if config.use_cache is False:
        raise ValueError("use_cache must be True: without a cache nothing can be evicted")
    asked = [name for name in _OUTPUTS if getattr(config, name)]
    if asked:
        raise ValueError(f"{', '.join(asked)} must be left out: the decode step keeps no logits or states")


def _sampling(processors: LogitsProcessorList) -> dict[str, Any]:
    """Return the arguments of a rollout that sample as the checked processors do."""
    warpers = [each for each in processors if type(each) in _WARPERS]
    return {(name := _WARPERS[type(each)]): getattr(each, name) for each in warpers}


def _check_model_kwargs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    """Return the attention mask, which transformers drops where it is all ones."""
    unknown = [name for name, value in model_kwargs.items() if name not in _IGNORED and value is not None]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} must be left out: a rollout takes input_ids and attention_mask"
        )
    attention_mask = model_kwargs.get("attention_mask")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if not attention_mask[:, -1].all():
        raise ValueError(
            "prompts must be left-padded, got an attention_mask with 0 in the last column; load the "
            "tokenizer with padding_side='left'"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None and not torch.equal(
        positions.masked_fill(attention_mask == 0, 0), token_positions(attention_mask)
    ):
        raise ValueError("position_ids must be left out: they count the tokens of attention_mask")
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise ValueError(
            "past_key_values must be empty: there is no record of its evictions; pass the whole prompt"
        )
    return attention_mask
