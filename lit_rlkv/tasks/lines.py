"""Rows of a user's file: where each stands, and one report of all that is wrong with them."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

N_REPORTED = 5
"""Bad rows named in one error; the others are counted."""

_Row = TypeVar("_Row")
_Parsed = TypeVar("_Parsed")


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """`file:number` and text of every line that is not blank.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: all lines are blank.
    """
    if not path.expanduser().is_file():
        raise FileNotFoundError(f"there is no file at {str(path)!r}; give the path of a file of JSON lines")
    # Not splitlines: it would also cut at characters that JSON allows inside a text.
    lines = path.expanduser().read_text(encoding="utf-8-sig").split("\n")  # some editors write a BOM
    if not any(line.strip() for line in lines):
        raise ValueError(f"{str(path)!r} has no lines, so it gives no data; write one JSON object per line")
    return ((f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip())


def parse_object(line: str) -> dict[str, Any]:
    """The JSON object that a line must hold.

    Raises:
        ValueError: the line is not JSON, or no object.
    """
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}); write one JSON object per line") from error
    if not isinstance(entry, dict):
        raise ValueError(f"got a {type(entry).__name__}; write one JSON object per line")
    return entry


def parse_rows(rows: Iterable[tuple[str, _Row]], parse: Callable[[_Row], _Parsed]) -> list[_Parsed]:
    """Every row parsed, given as (place, row).

    Raises:
        ValueError: what is wrong with the first bad rows, each with its place, and how many there are; every
            row is looked at before.
    """
    parsed, errors, n_rows = [], [], 0
    for where, row in rows:
        n_rows += 1
        try:
            parsed.append(parse(row))
        except ValueError as error:
            errors.append(f"{where}: {error}")
    if len(errors) == 1:
        raise ValueError(errors[0])
    if errors:
        n_named = min(len(errors), N_REPORTED)
        raise ValueError(
            "\n  ".join(
                [f"{len(errors)} of {n_rows} rows cannot be used, the first {n_named} are", *errors[:n_named]]
            )
        )
    return parsed
