"""Preferences from a dataset of the optional package datasets: on the hub, in a folder, or in a file."""

import importlib
from pathlib import Path
from typing import Any

from lit_rlkv.data.tasks.lines import parse_rows
from lit_rlkv.data.tasks.preferences import Preferences, parse_pair

_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
_SAVED = ("state.json", "dataset_dict.json")
"""What save_to_disk leaves in the folder of a dataset, and of one with splits."""


def load_preferences(
    dataset: str,
    *,
    name: str | None = None,
    split: str = "train",
    prompt_column: str | None = "prompt",
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
) -> Preferences:
    """The pairs of a Hugging Face dataset, each row as `parse_pair` takes it.

    Args:
        dataset: a name on the hub, a folder (of data files, or written by save_to_disk), or a parquet or JSON
            file.
        name: which of the dataset's configurations, where it has several.
        split: as the package writes it, so "train[:1000]" too; a dataset saved without splits is "train".
        prompt_column: None where both sides are whole conversations, which hold their prompt.

    Raises:
        ImportError: the package is missing.
        ValueError: nothing can be loaded, a column is missing, or rows that are no pairs, by their index.
    """
    rows = _load(dataset, name, split)
    wanted = {"prompt": prompt_column, "chosen": chosen_column, "rejected": rejected_column}
    columns = {key: column for key, column in wanted.items() if column is not None}
    missing = [column for column in columns.values() if column not in rows.column_names]
    if missing:
        raise ValueError(
            f"{dataset!r} has no column {' and '.join(map(repr, missing))}, it has "
            f"{', '.join(rows.column_names)}; set {', '.join(f'{key}_column' for key in wanted)}, with "
            "prompt_column=null where the sides are whole conversations"
        )
    entries = (
        (f"{dataset} row {index}", {key: row[column] for key, column in columns.items()})
        for index, row in enumerate(rows.select_columns([*columns.values()]))
    )
    return Preferences(parse_rows(entries, parse_pair), dataset)


def _load(dataset: str, name: str | None, split: str) -> Any:
    """A `datasets.Dataset`."""
    datasets = _import_datasets()
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
            "hub, a folder, or a parquet or JSON file, and a split of it"
        ) from error


def _of_split(saved: Any, split: str) -> Any:
    splits = saved if isinstance(saved, dict) else {"train": saved}
    if split not in splits:
        raise ValueError(f"it was saved with {', '.join(splits)}")
    return splits[split]


def _import_datasets() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            "load_preferences needs the package datasets, which is missing; pip install lit_rlkv[data]"
        ) from error
