"""GGUF checkpoints: a file is converted once into a folder that transformers loads like any other."""

import logging
import math
from glob import escape
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from lit_rlkv.files import atomic_dir, fingerprint
from lit_rlkv.models.loading import check_complete
from lit_rlkv.models.model_files import MAX_SAID, check_layers, check_sizes

log = logging.getLogger(__name__)
END_FIELDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Fields of a file with the tokens that end a response, a turn and a message."""
FORMAT = 2
"""Version of the conversion; a new one ignores older folders."""


def converted_gguf(file: Path, root: Path) -> Path:
    """Return the folder in `root` of a GGUF file converted to safetensors, and convert it if there is none.

    Weights are dequantized to float32, which is exact. The folder's name is a fingerprint of the file.

    Raises:
        ValueError: the file cannot be read, its weights are not exactly those of its model, its architecture
            is unknown, or the package gguf is missing.
    """
    folder = root / f"{file.stem}-{fingerprint(file.parent, escape(file.name))[:12]}-{FORMAT}"
    if not folder.is_dir():
        log.info("converting %s into %s, once", file, folder)
        reader = _read(file)
        with atomic_dir(folder, replaces=False) as partial:
            _convert(file, reader, partial)
    return folder


def _read(file: Path) -> Any:
    """Return the gguf package's reader of a file, none of whose fields or tensors is beyond its end."""
    try:
        from gguf import GGUFReader  # of an optional extra
    except ImportError as error:
        raise ValueError(f'{file} needs the package gguf; pip install -e ".[gguf]"') from error

    class Reader(GGUFReader):
        """Refuses to read beyond the end of the file, where numpy returns nothing and a list has no end."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
            found = super()._get(offset, dtype, count, *args, **kwargs)
            if len(found) < count:
                raise ValueError("it ends too early")
            return found

    try:
        return Reader(file)
    except Exception as error:  # of any type
        raise ValueError(f"{file} must be a whole GGUF file: {error}; download it again") from error


def _convert(file: Path, reader: Any, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    sizes = {tensor.name: math.prod(map(int, tensor.shape)) for tensor in reader.tensors}
    try:
        fields = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
        check_layers(file, fields)
        config = AutoConfig.from_pretrained(**source)
        check_sizes(file, config, sum(sizes.values()))
        tokenizer = AutoTokenizer.from_pretrained(**source)
        loaded, found = cast(Any, AutoModelForCausalLM).from_pretrained(
            **source,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, with their names
            **_dequantizing(),
        )
        processor: Any = TENSOR_PROCESSORS.get(fields["general.architecture"], TensorProcessor)
        places = get_gguf_hf_weights_map(loaded, processor(config={}))
        # transformers passes over tensors that it has no place for, as factors of RoPE.
        found["unexpected_keys"] = {
            name for name in sizes if not {name, name.removesuffix(".weight")} & places.keys()
        }
        check_complete(file, found)
        ends = list(dict.fromkeys(int(fields[name]) for name in END_FIELDS if name in fields))
    except Exception as error:  # transformers and tokenizers raise any type for a file that they cannot read
        reason = " ".join(str(error).split())[:MAX_SAID]
        raise ValueError(
            f"{file} cannot be converted by transformers ({type(error).__name__}: {reason}); give a "
            "checkpoint folder of safetensors, or another file"
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
