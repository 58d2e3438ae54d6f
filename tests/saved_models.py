"""Checkpoints as a user has them: a tiny model of some family, saved with a tokenizer of its own."""

import json
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lit_rlkv.data.tokenizers import build_task_tokenizer
from tests.models_zoo import build, tiny_config

N_TOKENS = 51
"""Size of the task tokenizer; the models have 64 embeddings, so 13 are padding."""
SECOND_END = "<turn>"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def save_checkpoint(folder: Path, family: str = "llama", *, tokenizer=None, ends=None, **changes) -> Path:
    """A random model with the task tokenizer, or another; `ends` is the generation config's list."""
    tokenizer = tokenizer or build_task_tokenizer()
    settings = {"pad_token_id": tokenizer.pad_token_id or 0, "eos_token_id": tokenizer.eos_token_id}
    model = build(tiny_config(family, **settings | changes))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if ends is not None:
        change_json(folder / "generation_config.json", eos_token_id=ends)
    return folder


def save_model(folder: Path, model: PreTrainedModel) -> Path:
    """That model with the task tokenizer."""
    tokenizer = build_task_tokenizer()
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The task tokenizer with a second end of a turn (id 51), a chat template, and no pad token."""
    tokenizer = build_task_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(SECOND_END, special=True)]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = None
    return tokenizer


def change_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))
