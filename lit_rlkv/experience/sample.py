"""Responses to encoded prompts, which end and are padded as the tokenizer says."""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_rlkv.data.tokenizers import end_token_ids
from lit_rlkv.rollout import generate
from lit_rlkv.types import PromptBatch, Rollout


def sample_responses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: PromptBatch, **options: Any
) -> Rollout:
    """`generate` on the model's device; `options` are the rest of what it takes."""
    prompts = prompts.to(model.device)
    return generate(
        model,
        prompts.input_ids,
        prompts.attention_mask,
        eos_token_id=end_token_ids(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
