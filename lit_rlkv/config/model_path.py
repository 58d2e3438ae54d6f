"""A model path: a folder, a GGUF file, or a name on the hub."""

import re
from pathlib import Path

from lit_rlkv.config.errors import require

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""File name of the model of `recipe=smollm2`."""
GGUF, GGUF_PART = ".gguf", re.compile(r"-\d+-of-\d+$")


def expanded(path: str | None) -> str | None:
    """A model path with `~` replaced; names on the hub stay as they are."""
    return str(Path(path).expanduser()) if path is not None and is_local(path) else path


def check_source(path: str, key: str = "model.path") -> None:
    """Refuse a path that means a folder or file here, and is none with a model.

    Raises:
        ConfigError: naming the key and the path.
    """
    place = Path(path).expanduser()
    require(
        not is_local(path) or (place / "config.json").is_file() or find_gguf(path, key) is not None,
        f"{key}={path} is not a checkpoint folder (no config.json there) and no GGUF file; give a folder "
        "written by save_pretrained, a file .gguf, or a hub name"
        + ("; `make smollm2` fetches this one" if place.name == SMOLLM2 else ""),
    )


def find_gguf(path: str, key: str = "model.path") -> Path | None:
    """Return the GGUF file that a model path means: the file, or the only one in a folder without a config.

    Raises:
        ConfigError: the file is one of several parts, or the folder has several.
    """
    place = Path(path).expanduser()
    if place.is_dir() and not (place / "config.json").is_file():
        files = sorted(place.glob(f"*{GGUF}"))
        require(
            len(files) <= 1,
            f"{key}={path} has {len(files)} GGUF files; give one of them: "
            f"{', '.join(file.name for file in files)}",
        )
    else:
        files = [place] if place.suffix == GGUF and place.is_file() else []
    if not files:
        return None
    require(
        not GGUF_PART.search(files[0].stem),
        f"{key}={path}: {files[0].name} is one of several parts; join them first: "
        "llama-gguf-split --merge FIRST_PART WHOLE.gguf",
    )
    return files[0]


def is_local(path: str) -> bool:
    """True if a model path means a folder or file; a name on the hub is NAME or OWNER/NAME.

    A name whose owner is a folder here means a path.
    """
    is_beside = "/" in path and Path(path).parent.is_dir()
    is_path = path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(GGUF)
    return is_path or is_beside or Path(path).exists()
