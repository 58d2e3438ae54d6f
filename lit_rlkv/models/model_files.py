"""Checks of a model's files, which a stranger may have written, before transformers reads them."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils.hub import cached_file, cached_files

from lit_rlkv.files import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_LAYERS = 10_000
"""Most layers in a config; transformers makes lists of this length before it makes layers."""
SLACK, UNSTORED = 1 << 20, 1 << 26
"""Numbers that parameters and buffers of a model may have beyond its files, for the check that names them."""
MAX_SAID = 240
"""Characters of an error of torch or transformers that are shown; some list the frames of a stack."""
CALLS, CALLS_PER_TENSOR = 4_000, 50
"""Most calls of torch while a model is built without memory, for itself and for each tensor in its files."""


def find_file(path: str | Path, name: str) -> Path | None:
    """Return a file of a folder or of a name on the hub; None without one that is regular."""
    found = cached_file(str(path), name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def check_texts(path: str | Path) -> dict[str, Any]:
    """Return the config of a folder or hub name as JSON; empty without one.

    Raises:
        ValueError: config or tokenizer name a file elsewhere, or there are too many layers to be built.
    """
    found = [find_file(path, name) for name in ("config.json", "tokenizer_config.json")]
    config, tokenizer = ({} if one is None else _read_object(one) for one in found)
    for name in tokenizer.get("fast_tokenizer_files") or ():
        _check_name(path, "tokenizer_config.json", name, ".json")
    check_layers(path, config)
    return config


def check_layers(path: str | Path, config: dict[str, Any]) -> None:
    """Refuse more layers than a model can have, in a config or in a part of it.

    Raises:
        ValueError: naming the field.
    """
    parts = [config]
    for part in parts:
        parts += [value for value in part.values() if isinstance(value, dict)]
        for name, value in part.items():
            if ("layer" in name or "block_count" in name) and isinstance(value, int) and value > MAX_LAYERS:
                raise ValueError(
                    f"{path}: its config must have at most {MAX_LAYERS:,} layers, got {name}="
                    f"{str(value)[:40]}; restore it"
                )


def find_weights(path: str | Path) -> list[Path]:
    """Return the files of the weights in a folder or of a hub name, those that transformers would read.

    Raises:
        ValueError: there are none, or the config or the index names anything but a regular file
            `*.safetensors` of the same folder: a pickle runs code, and other places are not the model's.
    """
    first = check_texts(path).get("transformers_weights") or WEIGHTS
    source = _check_name(path, "config.json", first, ".safetensors", ".safetensors.index.json")
    listed = find_file(path, source) or (find_file(path, INDEX) if source == WEIGHTS else None)
    if listed is None:
        raise ValueError(_without_weights(path))
    names = [listed.name]
    if listed.name.endswith(".json"):
        places = _read_object(listed).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ValueError(f"{listed} must have a weight_map; restore it")
        shards = {str(_check_name(path, listed.name, name, ".safetensors")) for name in places.values()}
        names = sorted(shards)
    if not Path(path).is_dir():
        cached_files(str(path), names)  # fetches them at once
    files = [listed.with_name(name) for name in names]
    folder = listed.parent.resolve()
    allowed = (folder, folder.parent.parent / "blobs")  # where links of the hub's cache lead
    for file in files:
        real = file.resolve()
        if not file.is_file() or not any(real.is_relative_to(place) for place in allowed):
            raise ValueError(
                f"{path} must hold {file.name} as a regular file, got "
                f"{f'a link to {real}' if file.is_file() else 'none'}; restore it, or copy it there"
            )
    return files


def check_sizes(path: str | Path, config: PretrainedConfig, shapes: list[list[int]]) -> None:
    """Check that a config describes a model of about as many numbers as there are in its files.

    The model is built without memory, and not further than its files can fill.

    Raises:
        ValueError: it describes a larger one, or one that cannot be built.
    """
    n_stored = sum(torch.Size(shape).numel() for shape in shapes)
    packed = 8 if hasattr(config, "quantization_config") else 1
    try:
        with torch.device("meta"), _Limit(CALLS + CALLS_PER_TENSOR * len(shapes)):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        parts = dict([*model.named_parameters(), *model.named_buffers()])
        n_buffers = sum(part.numel() for part in model.buffers())
    except Exception as error:  # sizes beyond 64 bits raise errors of any type
        if isinstance(error, ImportError) or "trust_remote_code" in str(error):
            raise
        said = " ".join(str(error).split())[:MAX_SAID]
        raise ValueError(
            f"{path}: its config describes a model that cannot be built ({type(error).__name__}: {said}); "
            "restore it"
        ) from error
    n_numbers = sum(part.numel() for part in parts.values())
    if n_numbers - min(n_buffers, UNSTORED) > 2 * packed * n_stored + SLACK:
        name, largest = max(parts.items(), key=lambda item: item[1].numel())
        raise ValueError(
            f"{path}: its config describes a model of {n_numbers:,} numbers ({name}: "
            f"{list(largest.shape)}), and its files hold {n_stored:,}; restore config or weights"
        )


def stored_shapes(files: list[Path]) -> list[list[int]]:
    """Return the shapes in the headers of safetensors."""
    shapes = []
    for file in files:
        with safe_open(file, "pt") as opened:
            shapes += [list(opened.get_slice(name).get_shape()) for name in opened.keys()]  # noqa: SIM118
    return shapes


class _Limit(TorchFunctionMode):
    """Ends what calls torch more often than allowed."""

    def __init__(self, n_calls: int) -> None:
        super().__init__()
        self.n_left = n_calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n_left -= 1
        if self.n_left < 0:
            raise ValueError("it has far more parts than its files")
        return func(*args, **(kwargs or {}))


def _check_name(path: str | Path, source: str, name: Any, *endings: str) -> str:
    if isinstance(name, str) and re.fullmatch(r"[^/\\]+", name) and name.endswith(endings):
        return name
    raise ValueError(
        f"{path}: {source} must name files *{' or *'.join(endings)} of its own folder, got {name!r}; "
        "pickles and files elsewhere are not read. Restore it, or convert the model once"
    )


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file)
        if not isinstance(found, dict):
            raise ValueError("it must be a JSON object")
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); restore it, or fetch the model again") from error
    return found


def _without_weights(path: str | Path) -> str:
    folder = Path(path)
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if folder.is_dir() and not pickles:
        return f"{path} holds no weights (no *.safetensors); give a folder written by save_pretrained"
    return (
        f"{path} must hold weights as *.safetensors, got {', '.join(pickles[:1]) or 'none'}; pickles may run "
        "code and are not loaded. If you trust it, convert it once: AutoModelForCausalLM.from_pretrained("
        f"{str(path)!r}, use_safetensors=False).save_pretrained('NEW'), and save the tokenizer there too"
    )
