"""GGUF checkpoints: a file is converted once into a folder that transformers loads like any other."""

import logging
from glob import escape
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from lit_rlkv.files import atomic_dir, fingerprint

log = logging.getLogger(__name__)
END_FIELDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Fields of a file with the tokens that end a response, a turn and a message."""
FORMAT = 1
"""Version of the conversion; a new one ignores older folders."""


def converted_gguf(file: Path, root: Path) -> Path:
    """Return the folder in `root` of a GGUF file converted to safetensors, and convert it if there is none.

    Weights are dequantized to float32, which is exact. The folder's name is a fingerprint of the file.

    Raises:
        ValueError: the file cannot be read, its architecture is unknown, or the package gguf is missing.
    """
    folder = root / f"{file.stem}-{fingerprint(file.parent, escape(file.name))[:12]}-{FORMAT}"
    if not folder.is_dir():
        log.info("converting %s into %s, once", file, folder)
        ends = _end_tokens(file)
        with atomic_dir(folder, replaces=False) as partial:
            _convert(file, partial, ends)
    return folder


def _end_tokens(file: Path) -> list[int]:
    """Return the end tokens that a file lists."""
    try:
        from gguf import GGUFReader  # of an optional extra
    except ImportError as error:
        raise ValueError(f'{file} needs the package gguf; pip install -e ".[gguf]"') from error
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, OSError) as error:
        raise ValueError(f"{file} must be a whole GGUF file: {error}; download it again") from error
    fields = [reader.get_field(name) for name in END_FIELDS]
    return list(dict.fromkeys(int(field.contents()) for field in fields if field is not None))


def _convert(file: Path, folder: Path, ends: list[int]) -> None:
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, **_dequantizing())
    except (
        ValueError,
        NotImplementedError,
        KeyError,
        OSError,
    ) as error:  # what it raises for a file that it cannot read
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{file} cannot be converted by transformers: {reason}; give a checkpoint folder of safetensors, "
            "or a file of another architecture"
        ) from error
    model = _plain_copy(loaded)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends or None, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantizing() -> dict[str, Any]:
    """Return the arguments of from_pretrained that ask for plain weights."""
    try:
        from transformers import GgufConfig
    except ImportError:  # older releases of transformers always dequantize
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _plain_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that shares the weights and has no mark of a quantization, which forbids saving it."""
    config = type(model.config).from_dict(
        {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    )
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return cast(PreTrainedModel, plain)
