"""Tables of the package datasets: load a file, a folder or a dataset on the hub, and read its rows."""

import importlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lit_rlkv.files import stamps

_BATCH = 1024
_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_SAVED = ("state.json", "dataset_dict.json")
"""Files that save_to_disk writes for a dataset, and for one with splits."""
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, StopIteration)
"""Errors of the package datasets, beside its own, for files with other content."""
_UNREADABLE = (ValueError, OverflowError, RecursionError)
"""Errors for values that Python cannot hold, such as text that is not UTF-8."""


def load(dataset: str, name: str | None, split: str) -> Any:
    """Return a `datasets.Dataset`.

    Raises:
        ImportError: the package datasets is missing.
        ValueError: nothing can be loaded, or the files of a folder name others outside of it.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f'{dataset!r} needs the package datasets, which is missing; pip install -e ".[data]", or '
            "give a file of JSON lines"
        ) from error
    try:
        return _load(datasets, dataset, name, split)
    except (datasets.exceptions.DatasetsError, *_DAMAGED) as error:
        cause = error.__cause__ or error
        said = " ".join(str(cause).split())
        raise ValueError(
            f"cannot load split {split!r} of {dataset!r}: {type(cause).__name__}: {said}; give a name on the "
            f"hub, a folder, or a file ({', '.join(_FILES)}) with rows, and a split of it"
        ) from error


def _load(datasets: Any, dataset: str, name: str | None, split: str) -> Any:
    path = Path(dataset).expanduser()
    if any((path / file).is_file() for file in _SAVED):
        saved = datasets.load_from_disk(str(path))
        splits = saved if isinstance(saved, dict) else {"train": saved}
        _check_inside(path, (file["filename"] for each in splits.values() for file in each.cache_files))
        if split not in splits:
            raise ValueError(f"it was saved with {', '.join(splits)}")
        return splits[split]
    if path.is_file():
        kind = _FILES.get(path.suffix.lower())
        if kind is None:
            raise ValueError("it is a file of another type")
        return datasets.load_dataset(kind, data_files=str(path), split=split)
    if path.is_dir():
        stamps(path)  # refuses a folder with too many files, as one that was given by mistake
        files = datasets.load_dataset_builder(str(path), name).config.data_files or {}
        _check_inside(path, (file for of_split in files.values() for file in of_split))
    return datasets.load_dataset(str(path) if path.exists() else dataset, name, split=split)


def _check_inside(folder: Path, files: Iterable[str]) -> None:
    """Check that the files of a dataset's folder are in it: its README.md or state.json may name any other.

    Raises:
        ValueError: one is not.
    """
    for file in files:
        # Links are not followed: those of a snapshot of the hub lead to its blobs.
        if "://" in file or not Path(os.path.abspath(file)).is_relative_to(folder.absolute()):
            raise ValueError(f"its own files name {file}, which is not in the folder; give that file itself")


def numbered_rows(rows: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Yield `AT row INDEX` and every row of a `datasets.Dataset` as a dict, or the error of its values."""
    for start in range(0, len(rows), _BATCH):
        found = _read(rows, start, min(start + _BATCH, len(rows)))
        yield from ((f"{at} row {index}", row) for index, row in enumerate(found, start))


def _read(rows: Any, start: int, stop: int) -> Iterator[dict[str, Any] | ValueError]:
    try:
        columns = rows[start:stop]
    except _UNREADABLE as error:
        if stop - start == 1:
            yield ValueError(f"a value cannot be read: {error}; fix it, or drop the row")
        else:
            for index in range(start, stop):
                yield from _read(rows, index, index + 1)
        return
    yield from (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
