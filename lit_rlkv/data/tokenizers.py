"""Text to token ids and back: the character tokenizer of the native tasks, and any other by name."""

import string
from collections.abc import Sequence
from dataclasses import asdict
from typing import cast

import torch
from jaxtyping import Bool, Int
from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_rlkv.types import Message, Prompt, PromptBatch, prompt_text

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
TASK_CHARACTERS = string.digits + string.ascii_lowercase + "+-*=,;:?>() \n"
"""Every character that the native tasks may write, in the order of their token ids."""

_TASK_VOCABULARY = {token: id_ for id_, token in enumerate((PAD_TOKEN, EOS_TOKEN, *TASK_CHARACTERS))}


def build_task_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, built in memory; a character outside the vocabulary raises."""
    backend = Tokenizer(models.WordLevel(_TASK_VOCABULARY))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer at a local path or hub name, set up for left padding; None gives the task tokenizer."""
    if path is None:
        return build_task_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=False)
    if tokenizer.eos_token is None:
        raise ValueError(
            f"the tokenizer at {path!r} has no eos token, so no completion could end; give it one"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_encodable(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Raise ValueError naming the characters, or words, of `text` that the tokenizer has no token for."""
    if _is_task_tokenizer(tokenizer):
        unknown = {character for character in text if character not in _TASK_VOCABULARY}
    elif tokenizer.unk_token_id is None or tokenizer.unk_token_id not in _plain_ids(tokenizer, text):
        unknown = set()
    else:
        unknown = {
            word for word in text.split() if tokenizer.unk_token_id in _plain_ids(tokenizer, word)
        } or {text}
    if unknown:
        shown = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(
            f"the tokenizer has no token for {shown} in {text!r}; reword it or load another tokenizer"
        )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text without any special token added; raises on a character that has no token."""
    check_encodable(tokenizer, text)
    return _plain_ids(tokenizer, text)


def format_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """The prompt in the tokenizer's chat template, up to where the assistant's answer begins.

    A text is one user message, or stays as it is where there is no template.

    Raises:
        ValueError: a chat where there is no template, or one that the template does not take.
    """
    if tokenizer.chat_template is None:
        if isinstance(prompt, str):
            return prompt
        raise ValueError(
            f"the tokenizer has no chat template to write the chat {prompt_text(prompt)!r} with; use a model "
            "that has one, or prompts that are text"
        )
    chat = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    messages = [asdict(message) for message in chat]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(
            f"the tokenizer's chat template refuses {prompt_text(prompt)!r}: {error}; change the "
            "messages, or use another model"
        ) from error
    return cast(str, text)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids of a formatted prompt, with the model's opening tokens unless a chat template wrote them."""
    text = format_prompt(tokenizer, prompt)
    for content in [prompt] if isinstance(prompt, str) else [message.content for message in prompt]:
        check_encodable(tokenizer, content)
    token_ids = tokenizer.encode(text, add_special_tokens=tokenizer.chat_template is None)
    if not token_ids:
        raise ValueError(
            f"the prompt {prompt!r} has no tokens, so there is nothing to continue; make it longer"
        )
    return token_ids


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> PromptBatch:
    """The prompts, formatted with the chat template where there is one, left-padded to the longest."""
    if not prompts:
        raise ValueError("an empty list of prompts makes no batch; give at least one")
    return left_pad([encode_prompt(tokenizer, prompt) for prompt in prompts], tokenizer.pad_token_id)


def left_pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> PromptBatch:
    """Rows of token ids that all end in the last column."""
    width = max(len(row) for row in rows)
    token_ids = torch.tensor([[pad_token_id] * (width - len(row)) + list(row) for row in rows])
    n_tokens = torch.tensor([len(row) for row in rows])
    return PromptBatch(token_ids, torch.arange(width) >= width - n_tokens[:, None])


def decode_completions(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Int[Tensor, "batch seq"],
    is_action: Bool[Tensor, "batch seq"],
) -> list[str]:
    """Text of each row's actions without the closing eos.

    Other special tokens stay visible: dropping them would let `2<pad>6` pass for 26.
    """
    completions = [row[is_mine].tolist() for row, is_mine in zip(token_ids, is_action, strict=True)]
    return [cast(str, tokenizer.decode(_without_eos(ids, tokenizer.eos_token_id))) for ids in completions]


def _without_eos(token_ids: list[int], eos_token_id: int) -> list[int]:
    return token_ids[:-1] if token_ids[-1:] == [eos_token_id] else token_ids


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _is_task_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    return len(tokenizer) == len(_TASK_VOCABULARY) and tokenizer.get_vocab() == _TASK_VOCABULARY
