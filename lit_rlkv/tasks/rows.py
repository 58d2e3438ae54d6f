"""Rows of a user's data wherever they lie: JSON lines as they are, all else through the package datasets."""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from lit_rlkv.files import stamps
from lit_rlkv.tasks.lines import numbered_lines, parse_object, parse_rows

EXAMPLE = "example:"
"""Before the name of a file that the package brings."""
EXAMPLES = Path(__file__).parent / "examples"
_LINES = ".jsonl"
_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_SAVED = ("state.json", "dataset_dict.json")
"""Files that save_to_disk writes for a dataset, and for one with splits."""

N_KEPT = 4
"""Tables kept in memory: those of a task to train on and to evaluate on, twice over."""

Columns = tuple[tuple[str, str], ...]
"""Pairs of a key and the column that it stands for."""
_Parsed = TypeVar("_Parsed")
_Row = TypeVar("_Row")
_Reader = TypeVar("_Reader", bound=Callable[..., Any])


@dataclass(frozen=True)
class Table(Generic[_Parsed]):
    """Rows, and where each stands, for messages."""

    source: str
    rows: list[_Parsed]
    places: list[str]
    digest: str | None = None
    """Digest of the data; None if the rows are generated."""


def _once(read: _Reader) -> _Reader:
    """A reader that reads again only files that have changed: the checks of a config build its task, too.

    All that it is given must be hashable; a `parse` is known again if it is equal.
    """

    @lru_cache(maxsize=N_KEPT)
    def kept(state: Any, *args: Any, **options: Any) -> Any:
        return read(*args, **options)

    @wraps(read)
    def reader(source: str | Path, *args: Any, **options: Any) -> Any:
        return kept(tuple(stamps(Path(source).expanduser())), source, *args, **options)

    return cast(_Reader, reader)


@_once
def read_lines(path: str | Path, parse: Callable[[dict[str, Any]], _Parsed]) -> Table[_Parsed]:
    """Every line of a file of JSON objects.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: lines that `parse` refuses, by number; all lines are looked at before.
    """
    return _lines(str(path), parse)


@_once
def read_rows(
    dataset: str,
    parse: Callable[[dict[str, Any]], _Parsed],
    columns: Columns,
    *,
    hint: str,
    name: str | None = None,
    split: str = "train",
) -> Table[_Parsed]:
    """Every row of a file, a folder or a dataset on the hub; `parse` gets what `columns` names, by its keys.

    Args:
        dataset: a file (.jsonl, .json, .parquet), a folder (of such files, or written by save_to_disk), a
            name on the hub, or `example:FILE` of those that the package brings.
        hint: what to do where a column is missing.
        name: which of the dataset's configurations, where it has several.
        split: as the package datasets writes it, so "train[:1000]" too; what has no splits is "train".

    Raises:
        ImportError: it takes the package datasets, which is missing.
        ValueError: nothing can be loaded, a column is missing, or rows that `parse` refuses, by their place.
    """
    where = path_of(dataset)
    if Path(where).suffix == _LINES and split == "train" and name is None:
        return _lines(where, lambda entry: parse(_chosen(entry, columns, list(entry), hint)))
    loaded = _load(where, name, split)
    _chosen(dict.fromkeys(loaded.column_names), columns, loaded.column_names, f"{hint} ({dataset!r})")
    rows = loaded.select_columns([*dict.fromkeys(column for _, column in columns)])
    at = dataset if split == "train" else f"{dataset} {split}"
    entries = ((f"{at} row {index}", row) for index, row in enumerate(rows))
    return _parsed(dataset, entries, lambda row: parse({key: row[column] for key, column in columns}))


def path_of(dataset: str) -> str:
    """Where a dataset lies: an example of the package in its folder, all else where it says.

    Raises:
        ValueError: the package brings no such example.
    """
    if not dataset.startswith(EXAMPLE):
        return dataset
    path = EXAMPLES / dataset.removeprefix(EXAMPLE)
    if not path.is_file() or path.parent != EXAMPLES:
        known = ", ".join(f"{EXAMPLE}{file.name}" for file in sorted(EXAMPLES.glob(f"*{_LINES}")))
        raise ValueError(f"there is no {dataset!r}; the package brings {known}")
    return str(path)


def _lines(path: str, parse: Callable[[dict[str, Any]], _Parsed]) -> Table[_Parsed]:
    return _parsed(path, numbered_lines(Path(path)), lambda line: parse(parse_object(line)))


def _parsed(
    source: str, entries: Iterable[tuple[str, _Row]], parse: Callable[[_Row], _Parsed]
) -> Table[_Parsed]:
    places: list[str] = []

    def noted() -> Iterator[tuple[str, _Row]]:
        for where, row in entries:
            places.append(where)
            yield where, row

    rows = parse_rows(noted(), parse)
    return Table(source, rows, places, _digest(rows))


def _digest(rows: Iterable[Any]) -> str:
    """Return the digest of the parsed rows; columns that a task does not read may change."""
    found = hashlib.blake2b(digest_size=8)
    for row in rows:
        found.update(json.dumps(row, default=vars).encode())
    return found.hexdigest()


def _chosen(entry: Mapping[str, Any], columns: Columns, has: list[str], hint: str) -> dict[str, Any]:
    missing = [column for _, column in columns if column not in entry]
    if missing:
        raise ValueError(f"no column {' and '.join(map(repr, missing))}, it has {', '.join(has)}; {hint}")
    return {key: entry[column] for key, column in columns}


def _load(dataset: str, name: str | None, split: str) -> Any:
    """A `datasets.Dataset`."""
    datasets = _import_datasets(dataset)
    path = Path(dataset).expanduser()
    if path.is_file() and path.suffix not in _FILES:
        raise ValueError(f"{dataset!r} is no file that can be read; convert it to {' or '.join(_FILES)}")
    try:
        if any((path / file).is_file() for file in _SAVED):
            return _of_split(datasets.load_from_disk(str(path)), split)
        if path.is_file():
            return datasets.load_dataset(_FILES[path.suffix], data_files=str(path), split=split)
        return datasets.load_dataset(str(path) if path.exists() else dataset, name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"cannot load split {split!r} of {dataset!r}: {error.__cause__ or error}; give a name on the "
            "hub, a folder, or a file (.jsonl, .json, .parquet), and a split of it"
        ) from error


def _of_split(saved: Any, split: str) -> Any:
    splits = saved if isinstance(saved, dict) else {"train": saved}
    if split not in splits:
        raise ValueError(f"it was saved with {', '.join(splits)}")
    return splits[split]


def _import_datasets(dataset: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f'{dataset!r} needs the package datasets, which is missing; pip install -e ".[data]", or '
            "give a file of JSON lines"
        ) from error
