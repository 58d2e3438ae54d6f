"""Text to token ids and back: the character tokenizer of the native tasks, and any other by name."""

import json
import string
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, cast

import torch
from jaxtyping import Bool, Int
from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import GENERATION_CONFIG_NAME

from lit_rlkv.models.loading import friendly_errors
from lit_rlkv.models.model_files import find_file, read_config
from lit_rlkv.rollout.turns import last_turn
from lit_rlkv.types import Message, Prompt, PromptBatch, prompt_text

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
MAX_SHOWN = 3
"""Tokens that an error names."""
TASK_CHARACTERS = string.digits + string.ascii_lowercase + "+-*=,;:?>() \n"
"""Every character that the native tasks may write, in the order of their token ids."""

_TASK_VOCABULARY = {token: id_ for id_, token in enumerate((PAD_TOKEN, EOS_TOKEN, *TASK_CHARACTERS))}


def build_task_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; a character outside the vocabulary raises."""
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
    """Return the tokenizer at a local path or hub name, with left padding; None gives the task tokenizer."""
    if path is None:
        return build_task_tokenizer()
    with friendly_errors(path):
        read_config(path)
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=False)
        listed = _listed_ends(tokenizer, path)
    if tokenizer.eos_token is None:
        raise ValueError(
            f"the tokenizer at {path!r} has no eos token, so no completion could end; give it one"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.end_ids = listed  # read by end_token_ids
    return tokenizer


def _listed_ends(tokenizer: PreTrainedTokenizerBase, path: str) -> tuple[int, ...]:
    """Return the end tokens in the checkpoint's generation config.

    Chat models list several, of which the tokenizer knows one. An id of ordinary text is left out: it comes
    from a default of the model's class, and would end responses amid a word.
    """
    file = find_file(path, GENERATION_CONFIG_NAME)
    listed = None if file is None else json.loads(file.read_text("utf-8")).get("eos_token_id")
    ids = [] if listed is None else [listed] if isinstance(listed, int) else listed
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return tuple(id_ for id_ in ids if id_ in special)


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return all tokens that end a response: the tokenizer's own, then those of its generation config."""
    listed = vars(tokenizer).get("end_ids", ())
    return list(dict.fromkeys([tokenizer.eos_token_id, *listed]))


def is_end(tokenizer: PreTrainedTokenizerBase, input_ids: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """True where a token ends a response."""
    return torch.isin(input_ids, torch.tensor(end_token_ids(tokenizer), device=input_ids.device))


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, n_embeddings: int) -> None:
    """Raise a ValueError if the model has no embedding for the padding token, an end token or any of a text.

    Special tokens that no text has, as for images, may lie beyond the embeddings.
    """
    own = {tokenizer.pad_token_id, *end_token_ids(tokenizer)}
    needed = set(own)
    if len(tokenizer) > n_embeddings:
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        needed |= {*tokenizer.get_vocab().values()} - special
    missing = {id_ for id_ in needed if id_ >= n_embeddings}
    if missing:
        first = sorted(missing, key=lambda id_: (id_ not in own, id_))[:MAX_SHOWN]
        shown = ", ".join(f"{tokenizer.convert_ids_to_tokens(id_)} ({id_})" for id_ in first)
        shown += f" and {len(missing) - MAX_SHOWN} more" if len(missing) > MAX_SHOWN else ""
        raise ValueError(
            f"the tokenizer's {shown} are beyond the {n_embeddings} tokens that the model embeds; it belongs "
            "to another model, or its pad token was added without resizing the embeddings"
        )


def check_encodable(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Raise a ValueError that names characters or words for which the tokenizer has no token."""
    unk, unknown = tokenizer.unk_token_id, set()
    if is_task_tokenizer(tokenizer):
        unknown = set(text) - _TASK_VOCABULARY.keys()
    elif unk is not None and unk in _plain_ids(tokenizer, text):
        unknown = {word for word in text.split() if unk in _plain_ids(tokenizer, word)} or {text}
    if unknown:
        shown = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(
            f"the tokenizer has no token for {shown} in {text!r}; reword it or load another tokenizer"
        )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text without special tokens; raise on a character without a token."""
    check_encodable(tokenizer, text)
    return _plain_ids(tokenizer, text)


Tool = Callable[..., Any]


def format_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, tools: Sequence[Tool] | None = None
) -> str:
    """Return the prompt in the tokenizer's chat template, up to the start of the assistant's answer.

    A text is one user message, or stays as it is without a template.

    Args:
        tools: functions that the template describes to the model, if it can.
    """
    if tokenizer.chat_template is None:
        if isinstance(prompt, str):
            return prompt
        raise ValueError(
            f"the tokenizer has no chat template to write the chat {prompt_text(prompt)!r} with; use a model "
            "that has one, or prompts that are text"
        )
    try:
        text = tokenizer.apply_chat_template(
            _messages(prompt), tools=[*tools] if tools else None, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise ValueError(
            f"the tokenizer's chat template refuses {prompt_text(prompt)!r}: {error}; change the "
            "messages, or use another model"
        ) from error
    return cast(str, text)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, tools: Sequence[Tool] | None = None
) -> list[int]:
    """Return the token ids of a formatted prompt, with opening tokens unless a chat template wrote them."""
    text = format_prompt(tokenizer, prompt, tools)
    for content in [prompt] if isinstance(prompt, str) else [message.content for message in prompt]:
        check_encodable(tokenizer, content)
    has_template = tokenizer.chat_template is not None
    input_ids: list[int] = tokenizer.encode(text, add_special_tokens=not has_template)
    if not input_ids:
        raise ValueError(f"the prompt {prompt!r} has no tokens; make it longer")
    return input_ids if has_template else _open_ended(input_ids, end_token_ids(tokenizer))


_TURN = "<<turn>>"
"""Text of a turn, to find what a chat template writes after one."""


def encode_observation(tokenizer: PreTrainedTokenizerBase, observation: str | Sequence[Message]) -> list[int]:
    """Return the tokens between a turn's end token and the next turn.

    They are those that the chat template writes there: the observation as messages, a text as one of the
    user, and the start of the assistant's answer. Without a template they are those of the text.

    Raises:
        ValueError: a text has no tokens, or the template refuses a message or leaves it out.
    """
    messages = (Message("user", observation),) if isinstance(observation, str) else tuple(observation)
    for message in messages:
        check_encodable(tokenizer, message.content)
    if tokenizer.chat_template is None and isinstance(observation, str):
        token_ids = _plain_ids(tokenizer, observation)
    else:
        chat = (Message("user", "."), Message("assistant", _TURN), *messages)
        _, _, after = format_prompt(tokenizer, chat).partition(_TURN)
        for message in messages:
            if message.content.strip() not in after:
                raise ValueError(
                    f"the tokenizer's chat template leaves out a message of the role {message.role!r}; use "
                    "another role, such as user, or another model"
                )
        token_ids = _plain_ids(tokenizer, after)
        if token_ids and token_ids[0] in end_token_ids(tokenizer):
            token_ids = token_ids[1:]  # the sampled turn has its own
    if not token_ids:
        raise ValueError(f"the observation {observation!r} has no tokens; make it longer")
    return token_ids


def _open_ended(input_ids: list[int], ends: Sequence[int]) -> list[int]:
    """Return a prompt without the end tokens that close it, as of `add_eos_token=True`; it has to go on."""
    n = len(input_ids)
    while n > 1 and input_ids[n - 1] in ends:
        n -= 1
    return input_ids[:n]


def count_tokens(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *completions: Sequence[str],
    tools: Sequence[Tool] = (),
) -> list[list[int]]:
    """Return the number of tokens of each prompt, and of each text of further columns of completions.

    Args:
        tools: see `format_prompt`.

    Raises:
        ValueError: a row cannot be encoded; `encode_prompt` and `encode` say which and why.
    """
    texts = _format_prompts(tokenizer, prompts, tools)
    has_template = tokenizer.chat_template is not None
    if is_task_tokenizer(tokenizer):  # which has no token for an unknown character either
        columns = [texts, *completions]
        is_known = _TASK_VOCABULARY.keys() >= {*"".join(map("".join, columns))}
        if has_template or not is_known or not all(texts) or not _has_token_per_character(tokenizer):
            raise ValueError("the number of characters may not be that of the tokens")
        return [[*map(len, column)] for column in columns]
    encoded = [_batch_ids(tokenizer, texts, add_special_tokens=not has_template)]
    if not has_template:
        ends = end_token_ids(tokenizer)
        encoded = [[_open_ended(input_ids, ends) for input_ids in encoded[0]]]
    encoded += [_batch_ids(tokenizer, column, add_special_tokens=False) for column in completions]
    unk, checked = tokenizer.unk_token_id, encoded
    if unk is not None and has_template:  # which may leave a message out
        contents = ["\n".join(message["content"] for message in _messages(prompt)) for prompt in prompts]
        checked = [*encoded, _batch_ids(tokenizer, contents, add_special_tokens=False)]
    for row in range(len(prompts)) if unk is not None else ():
        if any(unk in column[row] for column in checked):  # perhaps of a word, perhaps as an opening token
            encode_prompt(tokenizer, prompts[row])
            for column in completions:
                check_encodable(tokenizer, column[row])
    if not all(encoded[0]):
        raise ValueError("a prompt has no tokens")
    return [[*map(len, column)] for column in encoded]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], tools: Sequence[Tool] | None = None
) -> PromptBatch:
    """Return the prompts as in `encode_prompt`, left-padded to the longest."""
    if not prompts:
        raise ValueError("prompts must not be an empty list; give at least one")
    rows = [encode_prompt(tokenizer, prompt, tools) for prompt in prompts]
    width = max(len(row) for row in rows)
    input_ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
    n_tokens = torch.tensor([len(row) for row in rows])
    return PromptBatch(input_ids, torch.arange(width) >= width - n_tokens[:, None])


def padded(prompts: PromptBatch, width: int, pad_token_id: int) -> PromptBatch:
    """Return the prompts in `width` columns, with more padding on their left."""
    n_more = width - prompts.input_ids.shape[1]
    input_ids = F.pad(prompts.input_ids, (n_more, 0), value=pad_token_id)
    return PromptBatch(input_ids, F.pad(prompts.attention_mask, (n_more, 0)))


def decode_completions(
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Int[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
) -> list[str]:
    """Return the text of each row's last turn, exactly as sampled, without the closing end token.

    Other special tokens stay visible: without them `2<pad>6` would pass for 26. So do ids without a token, of
    a vocabulary padded to a round size, written as `<|151999|>`.
    """
    # On the CPU, else each row would wait for the device.
    input_ids, response_mask = input_ids.cpu(), last_turn(response_mask.cpu())
    rows = zip(input_ids, response_mask, strict=True)
    return [decode_turn(tokenizer, row[is_turn].tolist()) for row, is_turn in rows]


def decode_turn(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Return the text of one turn; see `decode_completions`."""
    ids, known = list(token_ids), [*set(token_ids)]
    names = zip(known, tokenizer.convert_ids_to_tokens(known), strict=True)
    nameless = {id_ for id_, name in names if name is None}
    return _decoded(tokenizer, ids[:-1] if ids and ids[-1] in end_token_ids(tokenizer) else ids, nameless)


def _decoded(tokenizer: PreTrainedTokenizerBase, input_ids: list[int], nameless: set[int]) -> str:
    parts = groupby(input_ids, key=nameless.__contains__)
    return "".join(
        "".join(f"<|{id_}|>" for id_ in ids)
        if is_nameless
        # Cleaned up, `a ! b` would become `a! b`, which was not sampled.
        else cast(str, tokenizer.decode([*ids], clean_up_tokenization_spaces=False))
        for is_nameless, ids in parts
    )


def _messages(prompt: Prompt) -> list[dict[str, str]]:
    chat = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return [dict(vars(message)) for message in chat]


def _format_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], tools: Sequence[Tool]
) -> list[str]:
    """Return the prompts as in `format_prompt`, a chat template in one call."""
    if tokenizer.chat_template is None:
        return [format_prompt(tokenizer, prompt) for prompt in prompts]
    chats = [_messages(prompt) for prompt in prompts]
    try:
        texts = tokenizer.apply_chat_template(
            chats, tools=[*tools] or None, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise ValueError(f"the tokenizer's chat template refuses a prompt: {error}") from error
    return cast(list[str], texts)


def _batch_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    if not any(texts) and not add_special_tokens:  # as the rejected sides of problems
        return [[]] * len(texts)
    encoded = tokenizer(
        [*texts],
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    return cast(list[list[int]], encoded["input_ids"])


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def is_task_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the tokens are the characters of the native tasks."""
    return len(tokenizer) == len(_TASK_VOCABULARY) and _has_task_vocabulary(tokenizer)


def _has_token_per_character(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if a text of TASK_CHARACTERS has the token of each of them and no others."""
    return tokenizer.encode(TASK_CHARACTERS) == [_TASK_VOCABULARY[one] for one in TASK_CHARACTERS]


@lru_cache(maxsize=4)
def _has_task_vocabulary(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True for the vocabulary of the native tasks; cached, as a tokenizer copies it for every look."""
    return tokenizer.get_vocab() == _TASK_VOCABULARY
