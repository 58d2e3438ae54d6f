"""What wandb's own files in a run folder hold: the truth of an offline run that a kill has cut short."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SYNCED = ".wandb.synced"
"""Ending of the file beside another for which `wandb sync` passes over that."""
BLOCK, HEADER, RECORD_HEADER = 32768, 7, 7
"""Bytes of LevelDB's log format, in which wandb writes."""
UNUSED, FULL, LAST = 0, 1, 4
"""Kinds of pieces: the rest of a block, a whole record, the end of one."""


def segments(run_dir: Path, run_id: str) -> list[Path]:
    """The files of a W&B run, one for each start."""
    # Two starts within a second are told apart by a number at the end of their folders' names.
    return sorted(run_dir.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb"))


def repair(path: Path) -> None:
    """Cut off a record that a kill has cut short, which would keep `wandb sync` from what comes after it.

    A file without any record is removed: there is nothing in it to upload.
    """
    log = path.read_bytes()
    end = max((end for end, _ in records(log)), default=0)
    if end == 0:
        path.unlink()
    elif end < len(log):
        os.truncate(path, end)


def last_iteration(path: Path, metric: str) -> int:
    """The highest logged value of the metric that counts iterations; 0 if there is none."""
    from wandb.proto import wandb_internal_pb2  # here: it takes a second

    highest = 0
    for _, data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]
        if record.WhichOneof("record_type") != "history":
            continue
        values = [item.value_json for item in record.history.item if _name(item) == metric]
        highest = max([highest, *(int(json.loads(value)) for value in values)])
    return highest


def records(log: bytes) -> Iterator[tuple[int, bytes]]:
    """Each whole record, and where it ends."""
    position, pieces = HEADER, b""
    while position + RECORD_HEADER <= len(log):
        left = BLOCK - position % BLOCK
        if left < RECORD_HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", log, position)
        if kind == UNUSED:
            position += left
            continue
        position += RECORD_HEADER
        if position + length > len(log):
            return
        pieces += log[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield position, pieces
            pieces = b""


def _name(item: Any) -> str:
    return str(item.key or "/".join(item.nested_key))
