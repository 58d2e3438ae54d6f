"""Rows of a user's data: JSON lines directly, other files and datasets through the package datasets."""

import hashlib
import importlib
import json
import reprlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from lit_rlkv.files import stamps
from lit_rlkv.types import Message, Prompt
from lit_rlkv.units import shortened

EXAMPLE = "example:"
"""Prefix of the name of a file in EXAMPLES."""
EXAMPLES = Path(__file__).parent / "examples"
N_REPORTED = 5
"""Bad rows named in one error; the others are counted."""
MAX_ERROR, END_OF_ERROR = 500, 200
"""Characters of an error that are shown, and how many of these are its end, which says what to do."""
N_CACHED = 4
"""Tables kept in memory: a task's rows to train on and to evaluate on, twice over."""
_LINES = ".jsonl"
_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_SAVED = ("state.json", "dataset_dict.json")
"""Files that save_to_disk writes for a dataset, and for one with splits."""
_ROLES = ("system", "user", "assistant")

Columns = tuple[tuple[str, str], ...]
"""Pairs of a key and the column that holds its values."""
_Parsed = TypeVar("_Parsed")
_Row = TypeVar("_Row")
_Reader = TypeVar("_Reader", bound=Callable[..., Any])


@dataclass(frozen=True)
class Table(Generic[_Parsed]):
    """Parsed rows, and the place of each for messages."""

    source: str
    rows: list[_Parsed]
    places: list[str]
    digest: str | None = None
    """Digest of the data; None if the rows are generated."""


def _cached_until_changed(read: _Reader) -> _Reader:
    """Cache a reader by its hashable arguments and the file's state: config checks build the task too."""

    @lru_cache(maxsize=N_CACHED)
    def cached(state: Any, *args: Any, **options: Any) -> Any:
        return read(*args, **options)

    @wraps(read)
    def reader(source: str | Path, *args: Any, **options: Any) -> Any:
        return cached(tuple(stamps(Path(source).expanduser())), source, *args, **options)

    return cast(_Reader, reader)


def read_lines(path: str | Path, parse: Callable[[dict[str, Any]], _Parsed]) -> Table[_Parsed]:
    """Parse every line of a file of JSON objects.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: `parse` refuses lines; the error names them after all lines were read.
    """
    _require_file(Path(path))
    return _read_lines(str(path), parse)


@_cached_until_changed
def _read_lines(path: str, parse: Callable[[dict[str, Any]], _Parsed]) -> Table[_Parsed]:
    return _parse_lines(path, parse)


@_cached_until_changed
def read_rows(
    dataset: str,
    parse: Callable[[dict[str, Any]], _Parsed],
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
    path = path_of(dataset)
    if Path(path).suffix == _LINES and split == "train" and name is None:
        return _parse_lines(path, lambda entry: parse(_select(entry, columns, list(entry), hint)))
    loaded = _load(path, name, split)
    _select(dict.fromkeys(loaded.column_names), columns, loaded.column_names, f"{hint} ({dataset!r})")
    rows = loaded.select_columns([*dict.fromkeys(column for _, column in columns)])
    at = dataset if split == "train" else f"{dataset} {split}"
    entries = ((f"{at} row {index}", row) for index, row in enumerate(rows))
    return _parse_table(dataset, entries, lambda row: parse({key: row[column] for key, column in columns}))


def path_of(dataset: str) -> str:
    """Return the path of an example of the package, or `dataset` itself."""
    if not dataset.startswith(EXAMPLE):
        return dataset
    path = EXAMPLES / dataset.removeprefix(EXAMPLE)
    if not path.is_file() or path.parent != EXAMPLES:
        known = ", ".join(f"{EXAMPLE}{file.name}" for file in sorted(EXAMPLES.glob(f"*{_LINES}")))
        raise ValueError(f"there is no {dataset!r}; the package has {known}")
    return str(path)


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Return `file:number` and text of every line that is not blank."""
    _require_file(path)
    with path.expanduser().open("rb") as file:
        start = file.read(len(BOM_UTF8))
        if start.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise ValueError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {path}")
        file.seek(len(BOM_UTF8) if start == BOM_UTF8 else 0)  # some editors write one
        n_lines = 0
        for number, line in enumerate(file, start=1):
            try:
                text = line.rstrip(b"\n").decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}:{number}: not UTF-8 ({error}); convert the file to UTF-8"
                ) from error
            if text.strip():
                n_lines += 1
                yield f"{path}:{number}", text
    if n_lines == 0:
        raise ValueError(f"{str(path)!r} must have lines, got none; write one JSON object per line")


def _require_file(path: Path) -> None:
    """Raise a FileNotFoundError unless a path is a regular file, before anything walks through a folder."""
    if not path.expanduser().is_file():
        raise FileNotFoundError(f"there is no file at {str(path)!r}; give the path of a file of JSON lines")


def parse_object(line: str) -> dict[str, Any]:
    """Return the JSON object of a line; raise a ValueError for anything else."""
    try:
        entry = _DECODER.decode(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error}); write one JSON object per line") from error
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply; write one JSON object per line") from error
    if not isinstance(entry, dict):
        raise ValueError(f"got a {type(entry).__name__}; write one JSON object per line")
    if "\\ud" in line or "\\uD" in line:  # half of a character cannot be encoded, by a tokenizer either
        try:
            json.dumps(entry, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"a text has half of a surrogate pair ({error.reason}); drop the line or fix it"
            ) from error
    return entry


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} is given twice; leave one")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates)


def parse_rows(rows: Iterable[tuple[str, _Row]], parse: Callable[[_Row], _Parsed]) -> list[_Parsed]:
    """Parse every row, given as (place, row).

    Raises:
        ValueError: `parse` refuses rows; the error names the first with their places and counts all.
    """
    parsed, errors, n_rows = [], [], 0
    for place, row in rows:
        n_rows += 1
        try:
            parsed.append(parse(row))
        except ValueError as error:
            errors.append(f"{place}: {shortened(str(error), MAX_ERROR, END_OF_ERROR)}")
    if len(errors) == 1:
        raise ValueError(errors[0])
    if errors:
        named = errors[:N_REPORTED]
        heading = f"{len(errors)} of {n_rows} rows cannot be used, the first {len(named)} are"
        raise ValueError("\n  ".join([heading, *named]))
    return parsed


def parse_prompt(value: Any, key: str) -> Prompt:
    """Return a text as it is, or messages as a chat; raise a ValueError that names `key` for other values."""
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
    return tuple(Message(message["role"], message["content"]) for message in value)


def require_user_turn(prompt: Prompt) -> Prompt:
    """Return the prompt; raise a ValueError unless it ends in a text of the user."""
    last = Message("user", prompt) if isinstance(prompt, str) else prompt[-1]
    if last.role != "user":
        raise ValueError(f"the prompt must end in a message of the user, got role {last.role!r}")
    if not last.content.strip():
        raise ValueError("the prompt is empty; drop the line or fix it")
    return prompt


def with_system(prompt: Prompt, system: str | None) -> Prompt:
    """Return the prompt behind a system message, unless it has its own or `system` is None."""
    if system is None:
        return prompt
    chat = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    return chat if chat[0].role == "system" else (Message("system", system), *chat)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _parse_lines(path: str, parse: Callable[[dict[str, Any]], _Parsed]) -> Table[_Parsed]:
    return _parse_table(path, numbered_lines(Path(path)), lambda line: parse(parse_object(line)))


def _parse_table(
    source: str, entries: Iterable[tuple[str, _Row]], parse: Callable[[_Row], _Parsed]
) -> Table[_Parsed]:
    places: list[str] = []

    def noted() -> Iterator[tuple[str, _Row]]:
        for place, row in entries:
            places.append(place)
            yield place, row

    rows = parse_rows(noted(), parse)
    # Of the parsed rows: columns that a task does not read may change.
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(json.dumps(row, default=vars).encode())
    return Table(source, rows, places, digest.hexdigest())


def _select(entry: Mapping[str, Any], columns: Columns, known: list[str], hint: str) -> dict[str, Any]:
    missing = [column for _, column in columns if column not in entry]
    if missing:
        raise ValueError(f"no column {' and '.join(map(repr, missing))}, it has {', '.join(known)}; {hint}")
    return {key: entry[column] for key, column in columns}


def _load(dataset: str, name: str | None, split: str) -> Any:
    """Return a `datasets.Dataset`."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f'{dataset!r} needs the package datasets, which is missing; pip install -e ".[data]", or '
            "give a file of JSON lines"
        ) from error
    path = Path(dataset).expanduser()
    if path.is_file() and path.suffix not in _FILES:
        raise ValueError(f"{dataset!r} must be a file of type {', '.join(_FILES)}; convert it")
    try:
        if any((path / file).is_file() for file in _SAVED):
            saved = datasets.load_from_disk(str(path))
            splits = saved if isinstance(saved, dict) else {"train": saved}
            if split not in splits:
                raise ValueError(f"it was saved with {', '.join(splits)}")
            return splits[split]
        if path.is_file():
            return datasets.load_dataset(_FILES[path.suffix], data_files=str(path), split=split)
        return datasets.load_dataset(str(path) if path.exists() else dataset, name, split=split)
    except StopIteration as error:
        raise ValueError(f"{dataset!r} holds no rows; write one JSON object per line") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"cannot load split {split!r} of {dataset!r}: {error.__cause__ or error}; give a name on the "
            "hub, a folder, or a file (.jsonl, .json, .parquet), and a split of it"
        ) from error
