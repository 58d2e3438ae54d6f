"""Values of JSON files, one per line or in one list, with the place of each."""

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ASKS = "write one JSON object per line, or one list of objects, in UTF-8"


def numbered_values(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield `FILE:LINE` and the value of every line, or `FILE row INDEX` and every value of the one list.

    The value of a line that is not JSON is the ValueError that says so.

    Raises:
        FileNotFoundError: there is no regular file.
        ValueError: the file begins with a list that is not JSON, or has no values.
    """
    if not path.expanduser().is_file():
        raise FileNotFoundError(f"{str(path)!r} does not exist as a file; give the path of JSON lines")
    with path.expanduser().open("rb") as file:
        first = next((line for line in file if line.strip()), b"").removeprefix(BOM_UTF8).lstrip()
    n_values = 0
    for place, value in _elements(path) if first.startswith(b"[") else _lines(path):
        n_values += 1
        yield place, value
    if n_values == 0:
        raise ValueError(f"{str(path)!r} must have rows, got none; {_ASKS}")


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.expanduser().open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    value = _loaded(line.removeprefix(BOM_UTF8) if number == 1 else line)
                except ValueError as error:
                    value = error
                yield f"{path}:{number}", value


def _elements(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        values = _loaded(path.expanduser().read_bytes().removeprefix(BOM_UTF8))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    yield from ((f"{path} row {index}", value) for index, value in enumerate(values))


def _loaded(content: bytes) -> Any:
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:  # the latter for values nested too deeply
        raise ValueError(f"not JSON ({error}); {_ASKS}") from error
