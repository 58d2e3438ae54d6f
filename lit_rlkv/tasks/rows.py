"""Rows of a user's data: JSON files directly, other files and datasets through the package datasets."""

import hashlib
import json
import logging
import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from lit_rlkv.tasks.hub import load, numbered_rows
from lit_rlkv.tasks.json_rows import numbered_values
from lit_rlkv.types import Message, Prompt
from lit_rlkv.units import shortened

log = logging.getLogger(__name__)
EXAMPLE = "example:"
"""Prefix of the name of a file in EXAMPLES."""
EXAMPLES = Path(__file__).parent / "examples"
N_REPORTED = 5
"""Bad rows named in one error; the others are counted."""
MAX_ERROR, END_OF_ERROR = 500, 200
"""Characters of an error that are shown, and how many of these are its end, which says what to do."""
_LIST_OF_OBJECTS = re.compile(r'\s*\[\s*\{\s*"')
_ROLES = ("system", "user", "assistant")

Columns = tuple[tuple[str, str], ...]
"""Pairs of a key and the column that holds its values."""
_Parsed = TypeVar("_Parsed")
_Row = TypeVar("_Row")
_Parser = Callable[[dict[str, Any]], _Parsed]


@dataclass(frozen=True)
class Table(Generic[_Parsed]):
    """Parsed rows, and the place of each for messages."""

    source: str
    rows: list[_Parsed]
    places: list[str]
    digest: str | None = None
    """Digest of the data; None if the rows are generated."""


def _check_is_path(source: object) -> None:
    if not isinstance(source, str | Path) or source == "":
        raise ValueError(f"the data must be one path or name, got {source!r}; give it as text")


def read_lines(path: str | Path, parse: _Parser[_Parsed]) -> Table[_Parsed]:
    """Parse every line of a file of JSON objects, or every object of its one list.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: `parse` refuses rows; the error names them after all rows were read.
    """
    _check_is_path(path)
    return _parse_table(str(path), numbered_values(Path(path)), parse)


def read_rows(
    dataset: str,
    parse: _Parser[_Parsed],
    columns: Columns,
    *,
    hint: str,
    name: str | None = None,
    split: str = "train",
) -> Table[_Parsed]:
    """Parse every row of a file, a folder or a dataset on the hub, as a dict with the keys of `columns`.

    Args:
        dataset: a file (.jsonl, .json, .parquet), a folder (of such files, or written by save_to_disk), a
            name on the hub, or `example:FILE` for an example of the package.
        hint: end of the error for a missing column, which says what to do.
        name: configuration of the dataset, if it has several.
        split: in the syntax of the package datasets, such as "train[:1000]"; data without splits is "train".

    Raises:
        ImportError: the package datasets is needed and missing.
        ValueError: nothing can be loaded, a column is missing, or `parse` refuses rows.
    """

    _check_is_path(dataset)

    def select(row: dict[str, Any]) -> _Parsed:
        _check_columns(columns, row, hint)
        return parse({key: row[column] for key, column in columns})

    path = path_of(dataset)
    if Path(path).suffix.lower() in (".json", ".jsonl") and split == "train" and name is None:
        return _parse_table(path, numbered_values(Path(path)), select)
    loaded = load(path, name, split)
    _check_columns(columns, loaded.column_names, f"{hint} ({dataset!r})")
    rows = loaded.select_columns([*dict.fromkeys(column for _, column in columns)])
    return _parse_table(
        dataset, numbered_rows(rows, dataset if split == "train" else f"{dataset} {split}"), select
    )


def _check_columns(columns: Columns, known: Iterable[str], hint: str) -> None:
    if missing := [column for _, column in columns if column not in known]:
        named, has = " and ".join(map(repr, missing)), ", ".join(known)
        raise ValueError(f"no column {named}, it has {has}; {hint}")


def path_of(dataset: str) -> str:
    """Return the path of an example of the package, or `dataset` itself."""
    if not dataset.startswith(EXAMPLE):
        return dataset
    path = EXAMPLES / dataset.removeprefix(EXAMPLE)
    if not path.is_file() or path.parent != EXAMPLES:
        known = ", ".join(f"{EXAMPLE}{file.name}" for file in sorted(EXAMPLES.glob("*.jsonl")))
        raise ValueError(f"there is no {dataset!r}; the package has {known}")
    return str(path)


class UnusableRowError(ValueError):
    """A row of a collection that is known to have such rows: it is left out, and all are counted."""


def parse_rows(rows: Iterable[tuple[str, _Row]], parse: Callable[[_Row], _Parsed]) -> list[_Parsed]:
    """Parse every row, given as (place, row).

    Raises:
        ValueError: `parse` refuses rows; the error names the first with their places and counts all.
    """
    parsed, first, n_bad = [], [], 0
    for place, row in rows:
        try:
            parsed.append(parse(row))
        except ValueError as error:
            n_bad += 1
            if n_bad <= N_REPORTED:
                first.append(f"{place}: {shortened(str(error), MAX_ERROR, END_OF_ERROR)}")
    if n_bad > 1:
        n_rows = len(parsed) + n_bad
        first.insert(0, f"{n_bad} of {n_rows} rows cannot be used, the first {len(first)} are")
    if first:
        raise ValueError("\n  ".join(first))
    return parsed


def parse_prompt(value: Any, key: str) -> Prompt:
    """Return a text as it is, or messages as a chat; raise a ValueError that names `key` for other values.

    A text that is a JSON list of messages is such a list: tables without nested columns hold chats so.
    """
    if isinstance(value, str):
        value = _messages_of(value) or value
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise ValueError(
            f"{key} must be a text or chat messages, got {reprlib.repr(value)}; write text in quotes, or a "
            'list of messages like {"role": "user", "content": "..."}'
        )
    unknown = sorted({message["role"] for message in value} - set(_ROLES))
    if unknown:
        raise ValueError(
            f"the roles in {key} must be {', '.join(_ROLES)}, got {', '.join(map(repr, unknown))}"
        )
    unread = ("tool_calls", "tool_call_id", "name")
    more = [name for name in unread if any(message.get(name) for message in value)]
    if more:
        raise ValueError(
            f"the messages in {key} must have role and content alone, got {', '.join(more)}; write calls as "
            "the text that the model says"
        )
    return tuple(Message(message["role"], message["content"]) for message in value)


def require_user_turn(prompt: Prompt) -> Prompt:
    """Return the prompt; raise a ValueError unless it ends in a text of the user."""
    if isinstance(prompt, str):
        text = prompt
    elif prompt[-1].role == "user":
        text = prompt[-1].content
    else:
        raise ValueError(f"the prompt must end in a message of the user, got role {prompt[-1].role!r}")
    if not text.strip():
        raise ValueError("the prompt is empty; drop the line or fix it")
    return prompt


def with_system(prompt: Prompt, system: str | None) -> Prompt:
    """Return the prompt behind a system message, unless it has its own or `system` is None."""
    if system is None:
        return prompt
    chat = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return chat if chat[0].role == "system" else (Message("system", system), *chat)


def _messages_of(text: str) -> list[Any] | None:
    """Return the messages that a text is the JSON of; None for any other text."""
    if not _LIST_OF_OBJECTS.match(text):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and found and all(map(_is_message, found)) else None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _fields(row: Any) -> dict[str, Any]:
    """Return the fields of a row; those that few have change no digest of rows without them."""
    return {name: value for name, value in vars(row).items() if name not in ("turns", "name") or value}


def _parse_table(source: str, entries: Iterable[tuple[str, Any]], parse: _Parser[_Parsed]) -> Table[_Parsed]:
    """Return the table of the entries, each a place and a dict, or the ValueError of an unreadable row."""
    rows, places, left_out = [], [], []
    # Of the parsed rows: columns that a task does not read may change.
    digest, encoder = hashlib.blake2b(digest_size=8), json.JSONEncoder(default=_fields)

    def add(entry: tuple[str, Any]) -> None:
        place, value = entry
        if isinstance(value, ValueError):
            raise value
        if not isinstance(value, dict):
            raise ValueError(f"a row must be an object, got {type(value).__name__}; write one per line")
        try:
            row = parse(value)
        except UnusableRowError as error:
            left_out.append(str(error))
            return
        text = encoder.encode(row)
        if "\\ud" in text:  # half of a surrogate pair cannot be encoded, by a tokenizer either
            json.dumps(row, default=_fields, ensure_ascii=False).encode()
        digest.update(text.encode())
        rows.append(row)
        places.append(place)

    n_rows = len(parse_rows(((entry[0], entry) for entry in entries), add))
    if left_out and not rows:
        raise ValueError(f"{source}: no row can be used: {left_out[0]}")
    if left_out:
        log.warning(
            "%s: %d of %d rows are left out, the first: %s", source, len(left_out), n_rows, left_out[0]
        )
    return Table(source, rows, places, digest.hexdigest())
