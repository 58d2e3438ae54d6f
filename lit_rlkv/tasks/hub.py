"""Tables of the package datasets: load a file, a folder or a dataset on the hub, and convert its rows."""

import importlib
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_SAVED = ("state.json", "dataset_dict.json")
"""Files that save_to_disk writes for a dataset, and for one with splits."""
_EMPTY = "BatchSize must be greater than 0"
"""Beginning of the package's error for a parquet file without rows."""
_DAMAGED = (LookupError, TypeError, AttributeError, RecursionError)
"""Errors of the package datasets for files of save_to_disk with other content."""


def load(dataset: str, name: str | None, split: str) -> Any:
    """Return a `datasets.Dataset`.

    Raises:
        ImportError: the package datasets is missing.
        ValueError: nothing can be loaded.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f'{dataset!r} needs the package datasets, which is missing; pip install -e ".[data]", or '
            "give a file of JSON lines"
        ) from error
    path = Path(dataset).expanduser()
    if path.is_file() and path.suffix.lower() not in _FILES:
        raise ValueError(f"{dataset!r} must be a file of type {', '.join(_FILES)}; convert it")
    try:
        with _without_errors_logged():
            if any((path / file).is_file() for file in _SAVED):
                saved = datasets.load_from_disk(str(path))
                splits = saved if isinstance(saved, dict) else {"train": saved}
                _check_inside(
                    path, (file["filename"] for each in splits.values() for file in each.cache_files)
                )
                if split not in splits:
                    raise ValueError(f"it was saved with {', '.join(splits)}")
                return splits[split]
            if path.is_file():
                return datasets.load_dataset(_FILES[path.suffix.lower()], data_files=str(path), split=split)
            if path.is_dir():
                builder = datasets.load_dataset_builder(str(path), name)
                _check_inside(
                    path, (file for files in (builder.config.data_files or {}).values() for file in files)
                )
            return datasets.load_dataset(str(path) if path.exists() else dataset, name, split=split)
    except StopIteration as error:
        raise ValueError(f"{dataset!r} holds no rows; write one JSON object per line") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError, *_DAMAGED) as error:
        raise ValueError(
            f"cannot load split {split!r} of {dataset!r}: {_message(error.__cause__ or error)}; give a name "
            "on the hub, a folder, or a file (.jsonl, .json, .parquet), and a split of it"
        ) from error


def _check_inside(folder: Path, files: Iterable[str]) -> None:
    """Check that the files of a dataset's folder are in it: its README.md or state.json may name any other.

    Raises:
        ValueError: one is not.
    """
    for file in files:
        # Links are not followed: those of a snapshot of the hub lead to its blobs.
        if "://" in file or not Path(os.path.abspath(file)).is_relative_to(folder.absolute()):
            raise ValueError(f"its own files name {file}, which is not in the folder; give that file itself")


@contextmanager
def _without_errors_logged() -> Iterator[None]:
    """Keep the package datasets from logging, in lines of its own, an error that it raises as well."""
    handlers = [*logging.getLogger("datasets").handlers, *logging.getLogger().handlers]
    for handler in handlers:
        handler.addFilter(_is_no_error_of_datasets)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_no_error_of_datasets)


def _is_no_error_of_datasets(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or not record.name.startswith("datasets")


def is_of_content(error: BaseException) -> bool:
    """True if an error of `load` is about what a file holds, and not about its name or split."""
    cause = error.__cause__
    while cause is not None:
        if isinstance(cause, UnicodeDecodeError) or type(cause).__name__.startswith("DatasetGeneration"):
            return True
        cause = cause.__cause__
    return False


def converted_rows(rows: Any, start: int, stop: int) -> list[dict[str, Any] | ValueError]:
    """Return rows of a `datasets.Dataset` as dicts, and the error of each that has no Python values."""
    try:
        columns = rows[start:stop]
    except (ValueError, OverflowError, RecursionError) as error:  # such as text that is not UTF-8
        if stop - start > 1:
            middle = (start + stop) // 2
            return converted_rows(rows, start, middle) + converted_rows(rows, middle, stop)
        return [ValueError(f"{_unreadable(rows, start)}: {_message(error)}; fix the value, or drop the row")]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _unreadable(rows: Any, index: int) -> str:
    """Return the names of the columns of a row that have no Python values."""
    bad = []
    for name in rows.column_names:
        try:
            rows.select_columns([name])[index]
        except (ValueError, OverflowError, RecursionError):
            bad.append(repr(name))
    return f"cannot read column {' and '.join(bad)}"


def _message(error: BaseException) -> str:
    """Return the message of an error on one line, behind its kind if that says more."""
    text = " ".join(str(error).split())
    if text.startswith(_EMPTY):
        return "it holds no rows"
    return f"{type(error).__name__}: {text}" if isinstance(error, _DAMAGED) else text
