"""Weights & Biases: one run for one run folder, however often it resumes; offline without an account."""

import json
import logging
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Literal
from uuid import uuid4

from lit_rlkv.files import write_atomically
from lit_rlkv.reporting.loggers.base import Cell, FileKind, RunLogger, RunStart, checked_interval
from lit_rlkv.reporting.plots.style import pixels
from lit_rlkv.reporting.report import Picture
from lit_rlkv.reporting.run_metrics import AXES, ITERATION, TOKENS, AxisValues

SYNCED = ".wandb.synced"
"""Ending of the file beside another for which `wandb sync` passes over that."""
BLOCK, HEADER, RECORD_HEADER = 32768, 7, 7
"""Bytes of LevelDB's log format, in which wandb writes."""
UNUSED, FULL, LAST = 0, 1, 4
"""Kinds of pieces: the rest of a block, a whole record, the end of one."""


def segments(run_dir: Path, run_id: str) -> list[Path]:
    """The files of a W&B run, one for each start."""
    # Two starts within a second differ by a number at the end of their folders' names.
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
    """Return the highest logged value of the iteration metric; 0 if there is none."""
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


log = logging.getLogger(__name__)

FILE_NAME = "wandb.json"
"""In the run's folder: the id of the W&B run."""

FORBIDDEN = "/\\#?%:"
"""Characters that W&B refuses in the name of a project."""

INIT_TIMEOUT_S = TEARDOWN_TIMEOUT_S = 60.0

Mode = Literal["online", "offline"]


class WandbRun(RunLogger):
    """Metrics over sampled tokens, a growing table of samples, figures, and files as artifacts.

    W&B only ever appends, and gives its own step to what it gets, so the axes are metrics of ours. After a
    resume it is found out what the W&B run holds: an iteration that is done again is not logged twice, and
    what a kill has kept from the service is made up for. A run that was offline and resumes with an account
    sends what the service lacks, but for figures, and `wandb sync` then passes over its offline parts.

    Args:
        entity: a team or user; None is the account's default.
        name: what W&B shows; None takes the name of the run's folder.
        offline: keep the run in its folder, for `wandb sync`; None does so where wandb finds no account.
        log_model: upload the last checkpoint.
        figures_every: iterations between figures; None draws them at the end only.
        finish_timeout_s: longest wait for uploads at the end; what is left by then can be synced.

    Raises:
        ValueError: an argument that cannot be meant.
    """

    def __init__(
        self,
        project: str,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        offline: bool | None = None,
        log_model: bool = False,
        figures_every: int | None = None,
        finish_timeout_s: float | int = 300,
    ) -> None:
        if not project or any(character in FORBIDDEN for character in project):
            raise ValueError(
                f"logger.project={project!r} must be a W&B project name without {' '.join(FORBIDDEN)}"
            )
        if offline is not None and not isinstance(offline, bool):
            raise ValueError(f"logger.offline={offline} must be true, false or null")
        if finish_timeout_s <= 0:
            raise ValueError(f"logger.finish_timeout_s={finish_timeout_s} must be above 0 seconds")
        self.labels: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "group": group,
            "tags": list(tags),
        }
        self.name = name
        self.offline = offline
        self.log_model = log_model
        self.figures_every = checked_interval("logger", figures_every)
        self.finish_timeout_s = float(finish_timeout_s)
        self._tables: dict[str, Any] = {}
        self._sent: list[Path] = []
        """Earlier parts of the run in its folder, whose contents the service has once this one ends."""

    def open(self, start: RunStart) -> str | None:
        import wandb  # here: it takes a second, for which only its users should pay, and it may be missing

        self._wandb = wandb
        self.run_dir = start.run_dir
        kept_id = _read_id(start.run_dir)
        earlier = [] if kept_id is None else segments(start.run_dir, kept_id)
        held = max((last_iteration(path, ITERATION) for path in earlier), default=0)
        for path in earlier:
            repair(path)
        self.run = self._init(kept_id or uuid4().hex[:8])
        # A sweep's agent has chosen an id before us, and wandb then keeps to that.
        _write_id(start.run_dir, self.run.id)
        is_online = not (self.run.offline or self.run.disabled)
        self._sent = earlier if is_online else []
        # What the service has counts for a run that resumes there, and it may have nothing yet.
        self.last_iteration = int(self.run.summary.get(ITERATION, 0)) if is_online else held
        self.keeps_tables = bool(self.run.resumed)
        for axis in AXES:
            self.run.define_metric(axis)
        self.run.define_metric("*", step_metric=TOKENS)
        config = {**start.config, "environment": dict(start.environment)}
        self.run.config.update(config, allow_val_change=True)
        return None if self.run.offline else f"W&B: {self.run.url}"

    def scalars(self, metrics: Mapping[str, float | int], place: AxisValues) -> None:
        self.run.log({**metrics, **place})

    def table(
        self,
        name: str,
        headings: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        place: AxisValues,
        *,
        grows: bool = False,
    ) -> None:
        # A table cannot be changed once it was logged; an incremental one is logged by what came to it.
        table = self._tables.get(name) if grows else None
        if table is None:
            table = self._wandb.Table(
                columns=list(headings), log_mode="INCREMENTAL" if grows else "IMMUTABLE"
            )
            self._tables[name] = table
        for row in rows:
            table.add_data(*row)
        self.run.log({name: table, **place})

    def figures(self, pictures: Sequence[Picture], place: AxisValues) -> None:
        images = {
            picture.key: self._wandb.Image(pixels(picture.figure), caption=picture.caption)
            for picture in pictures
        }
        self.run.log({**images, **place})

    def file(self, path: Path, kind: FileKind) -> None:
        if kind == "model" and not self.log_model:
            return
        artifact = self._wandb.Artifact(f"{kind}-{self.run.id}", type=kind)
        if path.is_dir():
            artifact.add_dir(str(path), policy="immutable")  # a checkpoint stays; no need for a copy
        else:
            artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    def close(self, is_complete: bool) -> str | None:
        is_offline = self.run.offline
        self.run.finish(exit_code=0 if is_complete else 1)
        for path in self._sent:  # the service has all of it from us, and by a sync would get it twice
            path.with_suffix(SYNCED).touch()
        return f"to upload to W&B: wandb sync {self.run_dir / 'wandb'}" if is_offline else None

    def _init(self, run_id: str) -> Any:
        try:
            return self._init_in(self._mode(), run_id)
        except Exception as error:
            if self.offline:
                raise
            log.warning("W&B cannot be reached, so this run is kept in its folder: %s", error)
            with suppress(TimeoutError):  # then another is started beside it
                end_service(self._wandb.teardown)  # else it holds on to the id
            return self._init_in("offline", run_id)

    def _mode(self) -> Mode | None:
        if self.offline is not None:
            return "offline" if self.offline else "online"
        if "WANDB_MODE" in os.environ:
            return None  # wandb reads it
        return "online" if self._wandb.login(prompt=False) else "offline"

    def _init_in(self, mode: Mode | None, run_id: str) -> Any:
        return self._wandb.init(
            **self.labels,
            name=self.name or self.run_dir.name,
            id=run_id,
            resume="allow",
            mode=mode,
            dir=str(self.run_dir),
            reinit="create_new",
            settings=self._wandb.Settings(
                console="off",  # the progress bar is no log
                silent=True,  # what the user should know is said by us
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=self.finish_timeout_s,
                finish_timeout_raises=True,
            ),
        )


def end_service(teardown: Callable[[], None]) -> None:
    """End wandb's own process, which itself waits without a limit for what it may still be sending.

    Raises:
        TimeoutError: it does not end.
    """
    errors: list[Exception] = []

    def end() -> None:
        try:
            teardown()
        except Exception as error:  # raised below
            errors.append(error)

    ending = Thread(target=end, daemon=True)
    ending.start()
    ending.join(TEARDOWN_TIMEOUT_S)
    if errors:
        raise errors[0]
    if ending.is_alive():
        raise TimeoutError(f"wandb's service has not ended within {TEARDOWN_TIMEOUT_S:g} seconds")


def _read_id(run_dir: Path) -> str | None:
    path = run_dir / FILE_NAME
    return str(json.loads(path.read_text())["id"]) if path.is_file() else None


def _write_id(run_dir: Path, run_id: str) -> None:
    write_atomically(run_dir / FILE_NAME, json.dumps({"id": run_id}))
