"""Files of JSON lines."""

import json
from collections.abc import Iterable
from pathlib import Path


def write_lines(path: Path, rows: Iterable[object]) -> str:
    """Write a line for each row, a text as it is; return the path as a text."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)
