"""Reads the files of an offline W&B run, like `wandb sync`."""

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

PATIENCE_S = 120.0


@dataclass
class OfflineRun:
    """The contents of one `.wandb` file."""

    folder: Path
    id: str = ""
    project: str = ""
    name: str = ""
    resumes: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    """Keys of nested values are joined by a slash."""
    step_metric: dict[str, str] = field(default_factory=dict)
    """The x-axis of each metric or glob that was defined."""
    group: str = ""
    tags: list[str] = field(default_factory=list)
    artifacts: dict[str, list[str]] = field(default_factory=dict)
    """Type of artifact to the paths in it."""
    exit_code: int | None = None

    def table(self, name: str) -> list[list[list[Any]]]:
        """The rows behind a table, each time that it was logged."""
        logged = [row[f"{name}/path"] for row in self.history if f"{name}/path" in row]
        return [json.loads((self.folder / "files" / path).read_text())["data"] for path in logged]


def finished_runs(run_dir: Path) -> list[OfflineRun]:
    """Return the W&B files of a run folder by their start, once wandb's own process has ended the last."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        found = [read(path) for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))]
        if found[-1].exit_code is not None:
            return found
        assert time.monotonic() < give_up_at, "wandb did not end its files"
        time.sleep(0.05)


def records(content: bytes) -> Iterator[bytes]:
    """The complete records of LevelDB's log format: blocks of 32 KiB, pieces with 7 bytes before each."""
    position, pieces = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        _, length, kind = struct.unpack_from("<IHB", content, position)
        if left < 7 or kind == 0:
            position += left
            continue
        pieces += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield pieces
            pieces = b""


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def read(path: Path) -> OfflineRun:
    found = OfflineRun(path.parent)
    for data in records(path.read_bytes()):
        record = Record.FromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
                found.id, found.project, found.name = run.run_id, run.project, run.display_name
                found.resumes = run.resume
                found.group, found.tags = run.run_group, list(run.tags)
            case "config":
                found.config |= values(record.config.update)
            case "history":
                found.history.append(values(record.history.item))
            case "metric":
                name = record.metric.name or record.metric.glob_name
                found.step_metric[name] = record.metric.step_metric
            case "artifact":
                paths = [entry.path for entry in record.artifact.manifest.contents]
                found.artifacts.setdefault(record.artifact.type, []).extend(paths)
            case "exit":
                found.exit_code = record.exit.exit_code
    return found
