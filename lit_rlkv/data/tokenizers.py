"""Text to token ids and back: the character tokenizer of the native tasks, and any other by name."""

import json
import string
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import cast

import torch
from jaxtyping import Bool, Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import GENERATION_CONFIG_NAME

from lit_rlkv.data.chat_template import check_rendering, special_ids, turn_ends
from lit_rlkv.models.loading import friendly_errors
from lit_rlkv.models.model_files import find_file, read_config
from lit_rlkv.rollout.turns import last_turn
from lit_rlkv.types import PromptBatch

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
MAX_SHOWN = 3
"""Tokens that an error names."""
TASK_CHARACTERS = string.digits + string.ascii_lowercase + "+-*=,;:?>() \n"
"""Every character that the native tasks may write, in the order of their token ids."""

TASK_VOCABULARY = {token: id_ for id_, token in enumerate((PAD_TOKEN, EOS_TOKEN, *TASK_CHARACTERS))}


def build_task_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; a character outside the vocabulary raises."""
    backend = Tokenizer(models.WordLevel(TASK_VOCABULARY))
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
    templates = tokenizer.chat_template or {}
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        check_rendering(template, json.dumps(tokenizer.special_tokens_map, default=str))
    return tokenizer


def _listed_ends(tokenizer: PreTrainedTokenizerBase, path: str) -> tuple[int, ...]:
    """Return the end tokens in the checkpoint's generation config.

    Chat models list several, of which the tokenizer knows one. An id of ordinary text is left out: it comes
    from a default of the model's class, and would end responses amid a word.
    """
    file = find_file(path, GENERATION_CONFIG_NAME)
    listed = None if file is None else json.loads(file.read_text("utf-8")).get("eos_token_id")
    ids = [] if listed is None else [listed] if isinstance(listed, int) else listed
    return tuple(id_ for id_ in ids if id_ in special_ids(tokenizer))


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return all tokens that end a response: of tokenizer, generation config and chat template."""
    listed = vars(tokenizer).get("end_ids", ())
    return list(dict.fromkeys([tokenizer.eos_token_id, *listed, *turn_ends(tokenizer)[0][-1:]]))


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
        unknown = set(text) - TASK_VOCABULARY.keys()
    elif unk is not None and unk in plain_ids(tokenizer, text):
        unknown = {word for word in text.split() if unk in plain_ids(tokenizer, word)} or {text}
    if unknown:
        shown = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(
            f"the tokenizer has no token for {shown} in {text!r}; reword it or load another tokenizer"
        )


def encodable(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a text with `?` for characters without a token, unless the tokenizer has an unknown token."""

    def is_known(part: str) -> bool:
        if is_task_tokenizer(tokenizer):
            return TASK_VOCABULARY.keys() >= {*part}
        try:
            return isinstance(plain_ids(tokenizer, part), list)
        except Exception:  # of the tokenizers library, which has no class for it
            return False

    text = text.encode("utf-8", "replace").decode()  # half of a pair has no token anywhere
    return text if is_known(text) else "".join(one if is_known(one) else "?" for one in text)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text without special tokens; raise on a character without a token."""
    check_encodable(tokenizer, text)
    return plain_ids(tokenizer, text)


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
    """Return the text of each row's last turn, exactly as sampled, without the tokens that close it.

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
    end = [*turn_ends(tokenizer)[0]]  # of several tokens in few templates
    has_end = bool(ids) and ids[-1] in end_token_ids(tokenizer)
    n_end = next((n for n in range(len(end), 1, -1) if ids[-n:] == end[-n:]), int(has_end))
    return _decoded(tokenizer, ids[: len(ids) - n_end], nameless)


def _decoded(tokenizer: PreTrainedTokenizerBase, input_ids: list[int], nameless: set[int]) -> str:
    parts = groupby(input_ids, key=nameless.__contains__)
    return "".join(
        "".join(f"<|{id_}|>" for id_ in ids)
        if is_nameless
        # Cleaned up, `a ! b` would become `a! b`, which was not sampled.
        else cast(str, tokenizer.decode([*ids], clean_up_tokenization_spaces=False))
        for is_nameless, ids in parts
    )


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def is_task_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the tokens are the characters of the native tasks."""
    return len(tokenizer) == len(TASK_VOCABULARY) and _has_task_vocabulary(tokenizer)


@lru_cache(maxsize=4)
def _has_task_vocabulary(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True for the vocabulary of the native tasks; cached, as a tokenizer copies it for every look."""
    return tokenizer.get_vocab() == TASK_VOCABULARY
