"""Checks of a model's files, which a stranger may have written, before transformers reads them."""

import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils.hub import cached_file, cached_files

from lit_rlkv.files import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_LAYERS, MAX_LABELS, MAX_SAID = 1_000, 100_000, 240
"""Most layers and labels of a config, of which transformers makes lists, and most characters shown of an
error; torch lists the frames of its stack."""
SLACK, UNSTORED = 1 << 20, 1 << 26
"""Numbers that parameters and buffers may have beyond the files; a closer check names what is missing."""


def find_file(path: str | Path, name: str) -> Path | None:
    """Return a regular file in a folder or of a name on the hub; None without one."""
    found = cached_file(str(path), name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def read_config(path: str | Path) -> dict[str, Any]:
    """Return config.json, checked as far as a tokenizer reads it; empty without one.

    Raises:
        ValueError: a file is damaged, there are too many layers, or the tokenizer is in another folder.
    """
    _check_links(Path(path))
    config = _read_object(find_file(path, "config.json"))
    check_layers(path, config)
    for name in _read_object(find_file(path, "tokenizer_config.json")).get("fast_tokenizer_files") or ():
        _own_name(path, name, ".json")
    return config


def check_layers(path: str | Path, config: dict[str, Any]) -> None:
    """Refuse a config, or a part of it, with more layers than transformers can list within seconds."""
    parts = [config]
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        for name, value in part.items():
            most = MAX_LABELS if name == "num_labels" else MAX_LAYERS
            is_size = re.search("layer|block_count|num_labels", name) and isinstance(value, int)
            if is_size and value > most:
                raise ValueError(
                    f"{path} must have {name} of at most {most:,}, got {str(value)[:40]}; restore its config"
                )


def _check_links(folder: Path) -> None:
    """Refuse links out of a folder: an export would copy what they lead to. The hub's cache has its own."""
    homes = (folder.resolve(), folder.resolve().parent.parent / "blobs")
    for place in (folder, folder / "additional_chat_templates"):
        for file in place.iterdir() if place.is_dir() else ():
            if file.is_symlink() and not any(file.resolve().is_relative_to(home) for home in homes):
                raise ValueError(f"{file} leads out of the model's folder; copy the file there")


def find_weights(path: str | Path) -> list[Path]:
    """Return the files of the weights in a folder or of a hub name, those that transformers would read.

    Raises:
        ValueError: there are none, or config or index name anything but regular files `*.safetensors` of the
            same folder: a pickle runs code, and another folder is not the model's.
    """
    named = read_config(path).get("transformers_weights") or WEIGHTS
    source = find_file(path, _own_name(path, named, ".safetensors", ".index.json")) or find_file(path, INDEX)
    if source is None:
        pickles = sorted(file.name for pattern in PICKLES for file in Path(path).glob(pattern))
        raise ValueError(
            f"{path} must hold weights as *.safetensors, got {pickles[0]}; pickles may run code and are not "
            "loaded. If you trust it, convert it once: AutoModelForCausalLM.from_pretrained("
            f"{str(path)!r}, use_safetensors=False).save_pretrained('NEW'), and save the tokenizer there too"
            if pickles
            else f"{path} holds no weights (no *.safetensors); give a folder written by save_pretrained"
        )
    places = _read_object(source).get("weight_map") if source.suffix == ".json" else {"": source.name}
    listed = places.values() if isinstance(places, dict) else [places]
    names = sorted({_own_name(path, name, ".safetensors") for name in listed})
    if not Path(path).is_dir():
        cached_files(str(path), names)  # fetches them
    folder = source.parent.resolve()
    homes = (folder, folder.parent.parent / "blobs")  # where links of the hub's cache lead
    files = [source.with_name(name) for name in names]
    for file in files:
        if not (file.is_file() and any(file.resolve().is_relative_to(home) for home in homes)):
            raise ValueError(
                f"{path} must hold {file.name} as a regular file, or as a link of the hub's cache; restore "
                "or copy it"
            )
    return files


def n_stored(files: list[Path], *, is_quantized: bool = False) -> int:
    """Return how many numbers safetensors have by their headers.

    Raises:
        ValueError: most of them are no floats, and no config says how they are quantized.
    """
    n_all = n_floats = 0
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                n = math.prod(part.get_shape())
                n_all, n_floats = n_all + n, n_floats + n * part.get_dtype().startswith(("F", "BF"))
    if not is_quantized and n_floats < n_all / 2:
        raise ValueError(
            f"{files[0].parent} must have weights of floats, or quantization_config in its config; restore it"
        )
    return n_all


def check_sizes(path: str | Path, config: PretrainedConfig, n_stored: int) -> None:
    """Refuse a config of a far larger model than one whose weights are so many numbers.

    The model is built without memory. Quantized weights are packed, and tied ones are stored once.
    """
    packed = 8 if hasattr(config, "quantization_config") else 1
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        sizes = {name: part.numel() for name, part in model.named_parameters()}
        sizes["buffers"] = max(sum(part.numel() for part in model.buffers()) - UNSTORED, 0)
    except Exception as error:  # sizes beyond 64 bits raise errors of any type
        if isinstance(error, ImportError):
            raise
        said = " ".join(str(error).split())[:MAX_SAID]
        raise ValueError(
            f"{path} has a config of which no model can be made ({type(error).__name__}: {said}); restore it"
        ) from error
    if sum(sizes.values()) > 2 * packed * n_stored + SLACK:
        largest = max(sizes, key=sizes.__getitem__)
        raise ValueError(
            f"{path} has a config of a model with {sum(sizes.values()):,} numbers ({largest}: "
            f"{sizes[largest]:,}), and weights of {n_stored:,}; restore config or weights"
        )


def _own_name(path: str | Path, name: Any, *endings: str) -> str:
    """Return a name that a file gives, if it is of a file in the same folder with one of the endings."""
    if isinstance(name, str) and re.fullmatch(r"[^/\\]+", name) and name.endswith(endings):
        return name
    raise ValueError(
        f"{path} must name files *{' or *'.join(endings)} of its own folder in its configs and index, got "
        f"{name!r}; pickles and files elsewhere are not read, restore or convert the model"
    )


def _read_object(file: Path | None) -> dict[str, Any]:
    try:
        found = {} if file is None else read_json(file)
        if not isinstance(found, dict):
            raise ValueError("it must be a JSON object")
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); restore it, or fetch the model again") from error
    return found
