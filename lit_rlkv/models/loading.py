"""Loading of causal LMs from a folder or the hub: safetensors only, no remote code."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lit_rlkv.models.model_files import MAX_SAID, check_sizes, find_file, find_weights, n_stored
from lit_rlkv.out_of_memory import is_out_of_memory

DROPOUT_NAMES = ("dropout", "pdrop", "jitter", "layerdrop")
"""Substrings of config fields for random noise during training."""
QUANTIZATIONS = ("4bit",)
MAX_NAMED = 3
"""Weights that an error names."""


def load_causal_lm(
    path: str | Path,
    dtype: torch.dtype,
    *,
    quantization: str | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a model with its weights in `dtype`, on the CPU unless it is quantized.

    Args:
        quantization: "4bit" keeps the linear layers in NF4 (QLoRA, arXiv:2305.14314) and computes in `dtype`.
        device: must be CUDA with a quantization; not used otherwise.

    Raises:
        ValueError: the weights are not safetensors, or not exactly those of the model; there are adapters
            beside them; the model needs remote code; or the quantization is unknown or not available.
    """
    options = {} if quantization is None else _quantized(quantization, dtype, device)
    with friendly_errors(path):
        if find_file(path, "adapter_config.json") is not None:
            raise ValueError(
                f"{path} has an adapter (adapter_config.json), which would be lost; merge it first (of peft: "
                "merge_and_unload) and save the model without it, or move the adapter away"
            )
        files = find_weights(path)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        is_quantized = hasattr(config, "quantization_config")
        check_sizes(path, config, n_stored(files, is_quantized=is_quantized))
        # Every family supports eager; a checkpoint may name an implementation that is not installed.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=without_dropout(config),
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, with their names
            **options,
        )
    check_complete(path, loaded[1])
    return cast(PreTrainedModel, loaded[0])


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Set all dropout rates of a config to 0 in place, and return it.

    Sampler and learner must compute the same function. Functional dropout reads its rate from the config.
    """
    for name, value in vars(config).items():
        if isinstance(value, float) and any(part in name for part in DROPOUT_NAMES):
            setattr(config, name, 0.0)
    for name in config.sub_configs:
        part = vars(config).get(name)
        if isinstance(part, PretrainedConfig):
            without_dropout(part)
    return config


def check_complete(path: str | Path, found: Mapping[str, Any]) -> None:
    """Refuse weights that transformers has made up or left out, by its own report."""
    missing, unexpected = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    other_size = sorted(name for name, *_ in found["mismatched_keys"])
    for names, what, remedy in (
        (missing, "lacks", "restore it; a random one would take its place, another at each start"),
        (other_size, "has other sizes than its config for", "restore weights or config"),
        (unexpected, "has no place in its model for", "correct the config, or leave it out"),
    ):
        if names:
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            shown = ", ".join(name[:MAX_SAID] for name in names[:MAX_NAMED])
            raise ValueError(f"{path} {what} {shown}{more}; {remedy}")


@contextmanager
def friendly_errors(path: str | Path) -> Iterator[None]:
    """Raise the errors of loading a model or tokenizer as short messages.

    Raises:
        ValueError: it needs remote code, a file is missing, damaged or not whole.
    """
    try:
        yield
    except Exception as error:  # transformers, tokenizers and safetensors raise any type for a damaged file
        said = " ".join(str(error).split())
        if "trust_remote_code" in said or "custom code" in said:
            config = Path(path) / "config.json"
            name = json.loads(config.read_text()).get("model_type") if config.is_file() else None
            kind = f"model_type {name}" if name else "auto_map in its config"
            raise ValueError(
                f"{path} needs remote code ({kind}), which is never run; use a model that transformers "
                "includes"
            ) from error
        is_said = isinstance(error, ValueError | OSError | ImportError) and not isinstance(
            error, json.JSONDecodeError | UnicodeDecodeError
        )
        if is_said or is_out_of_memory(error):
            raise
        raise ValueError(
            f"{path} has a file that is damaged or not whole ({type(error).__name__}: {said[:MAX_SAID]}); "
            "restore it, or fetch the model again"
        ) from error


def _quantized(quantization: str, dtype: torch.dtype, device: torch.device | None) -> dict[str, Any]:
    """Return the arguments of from_pretrained for a quantized model."""
    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"quantization={quantization!r} is unknown; choose {', '.join(QUANTIZATIONS)} or null"
        )
    if device is None or device.type != "cuda":
        raise ValueError(f"quantization={quantization} needs CUDA, got device {device}; use null")
    try:
        import bitsandbytes  # noqa: F401  # of an optional extra
    except ImportError as error:
        raise ValueError(
            f'quantization={quantization} needs bitsandbytes; pip install -e ".[quant]", or use null'
        ) from error
    from transformers import BitsAndBytesConfig

    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **nf4), "device_map": {"": device}}
