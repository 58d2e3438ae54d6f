"""Tokenizers with chat templates: TRL's, each with its special tokens, and one of a few words."""

# ruff: noqa: RUF001, as templates are long and have such characters

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>]+｜>|</?[a-z_]+>|<\|[a-z\"_]+>|<[a-z_]+\|>|\[[a-zA-Z]+\]")


@cache
def folder() -> Path:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


def byte_tokenizer(template: str, eos: str = "<eos>", ends: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and the special tokens of a template, whose generation config lists `ends`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token=eos, pad_token="<pad>", padding_side="left"
    )
    special = sorted({*_SPECIAL.findall(template), *ends} - {"<bos>", eos, "<pad>"})
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.end_ids = tuple(tokenizer.convert_tokens_to_ids([*ends]))
    return tokenizer


def trl_tokenizer(name: str, eos: str = "<eos>", ends: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """The tokenizer of one of TRL's templates."""
    return byte_tokenizer((folder() / f"{name}.jinja").read_text("utf-8"), eos, ends)


def word_tokenizer(**special):
    """A stand-in for a downloaded tokenizer: whole words, an unknown token and an opening token."""
    vocabulary = {"<unk>": 0, "<bos>": 1, "<eos>": 2, "<pad>": 3, "one": 4, "two": 5}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", **special)
