"""Writing files so that no reader, and no run that goes on after a kill, ever sees half of one."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Put the text (UTF-8, line ends as they are) in the place of what the file held, all at once."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
