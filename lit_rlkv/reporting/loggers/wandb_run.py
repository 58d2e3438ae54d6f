"""Weights & Biases: one W&B run per run folder, also across resumes; offline without an account."""

import json
import logging
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Literal
from uuid import uuid4

from lit_rlkv.checks import Range
from lit_rlkv.files import read_if_intact, read_json, write_atomically
from lit_rlkv.reporting.loggers import FileKind, Rows, RunLogger, RunStart, checked_interval
from lit_rlkv.reporting.pictures import Picture
from lit_rlkv.reporting.plots.style import pixels
from lit_rlkv.reporting.run_metrics import AXES, ITERATION, TOKENS, AxisValues

log = logging.getLogger(__name__)

FILE_NAME = "wandb.json"
"""File in the run's folder with the id of the W&B run."""
FORBIDDEN = "/\\#?%:"
"""Characters that W&B does not allow in project names."""
INIT_TIMEOUT_S = TEARDOWN_TIMEOUT_S = 60.0
HIDDEN = re.compile(
    "gradient/(loss|policy)/layer_.+|kv/layer_kl/.+|kv/ratio_seq_.+|"
    "rollout_corr/(log_ppl_diff|rollout_is_seq)_.+|rollout_corr/(rollout|training)_log_ppl"
)
"""Metrics without a panel of their own: those of each layer, which figures show, and variants of others."""
WITH_BEST = ("reward", "rewards/exact_match")
"""Metrics whose summary has the highest value beside the last one."""
Mode = Literal["online", "offline"]
SYNCED = ".wandb.synced"
"""Suffix of the marker file that makes `wandb sync` skip a run file."""
BLOCK, HEADER, RECORD_HEADER = 32768, 7, 7
"""Sizes in bytes of LevelDB's log format, which wandb uses."""
UNUSED, FULL, LAST = 0, 1, 4
"""Record types: padding of a block, a full record, the last fragment of a record."""


def run_files(run_dir: Path, run_id: str) -> list[Path]:
    """Return the files of a W&B run, one per start, in order."""
    # Two starts within a second differ by a number at the end of their folders' names.
    return sorted(run_dir.glob(f"wandb/*run-*-{run_id}*/run-{run_id}.wandb"))


def _read_id(path: Path) -> str | None:
    """Return the id of the W&B run in FILE_NAME; it becomes part of paths."""
    found = read_json(path)["id"]
    if not isinstance(found, str) or not re.fullmatch(r"[\w.-]+", found):
        raise ValueError(f"{found!r} is no id of a W&B run")
    return found


def truncate_incomplete(path: Path) -> None:
    """Truncate an incomplete last record, which would stop `wandb sync`; remove a file without records."""
    content = path.read_bytes()
    end = max((end for end, _ in records(content)), default=0)
    if end == 0:
        path.unlink()
    elif end < len(content):
        os.truncate(path, end)


def last_iteration(path: Path, metric: str) -> int:
    """Return the highest logged value of the iteration metric; 0 if there is none."""
    from wandb.proto import wandb_internal_pb2  # imported here, because it takes a second

    highest = 0
    for _, data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]
        if record.WhichOneof("record_type") != "history":
            continue
        for item in record.history.item:
            if (item.key or "/".join(item.nested_key)) == metric:
                highest = max(highest, int(json.loads(item.value_json)))
    return highest


def records(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield each complete record with the position of its end."""
    position, pieces = HEADER, b""
    while position + RECORD_HEADER <= len(content):
        left = BLOCK - position % BLOCK
        _, length, kind = struct.unpack_from("<IHB", content, position)
        if left < RECORD_HEADER or kind == UNUSED:
            position += left
            continue
        position += RECORD_HEADER
        if position + length > len(content):
            return
        pieces += content[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield position, pieces
            pieces = b""


class WandbRun(RunLogger):
    """Logs metrics over sampled tokens, a table of samples, figures, and files as artifacts.

    W&B only appends, with its own step, so our axes are logged as metrics. After a resume, repeated
    iterations are not logged again, and iterations that W&B lacks are sent. An offline run that resumes
    online sends everything that W&B lacks except figures, and `wandb sync` then skips its offline files.

    Args:
        entity: a team or user; None is the account's default.
        name: display name; None is the name of the run's folder.
        group: name that runs of one setting share; None is no group.
        offline: keep the run in its folder, for `wandb sync`; None does so if wandb finds no account.
        log_model: upload the last checkpoint.
        figures_every: iterations between figures; None draws them at the end only.
        finish_timeout_s: longest wait for uploads at the end; the rest can be synced later.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        project: str,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        offline: bool | None = None,
        log_model: bool = False,
        figures_every: int | None = None,
        finish_timeout_s: float | int = 300,
    ) -> None:
        if not project or any(character in FORBIDDEN for character in project):
            raise ValueError(
                f"logger.project must be a W&B project name without {' '.join(FORBIDDEN)}, got {project!r}"
            )
        if offline is not None and not isinstance(offline, bool):
            raise ValueError(f"logger.offline must be true, false or null, got {offline}")
        Range(above=0).check("logger.finish_timeout_s", finish_timeout_s)
        self.labels: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "group": group,
            "tags": list(tags or ()),
        }
        self.name = name
        self.offline = offline
        self.log_model = log_model
        self.figures_every = checked_interval(figures_every)
        self.finish_timeout_s = float(finish_timeout_s)
        self._tables: dict[str, Any] = {}
        self._seen: set[str] = set()
        self._sent: list[Path] = []
        """Earlier files of the run, all of whose contents are uploaded once this run ends."""

    def open(self, start: RunStart) -> str | None:
        import wandb  # imported here, because it takes a second and is optional

        self._wandb = wandb
        self.run_dir = start.run_dir
        id_file = start.run_dir / FILE_NAME
        kept_id = read_if_intact(id_file, _read_id, None, sets_aside=True)
        earlier = [] if kept_id is None else run_files(start.run_dir, kept_id)
        held = max((last_iteration(path, ITERATION) for path in earlier), default=0)
        for path in earlier:
            truncate_incomplete(path)
        self.run = self._init(kept_id or uuid4().hex[:8])
        write_atomically(id_file, json.dumps({"id": self.run.id}))  # a sweep agent chooses the id itself
        is_online = not (self.run.offline or self.run.disabled)
        self._sent = earlier if is_online else []
        # Online, the iterations on the server count, not those in the files.
        self.last_iteration = int(self.run.summary.get(ITERATION, 0)) if is_online else held
        self.keeps_tables = bool(self.run.resumed)
        self._define_metrics()
        place = {"environment": dict(start.environment), "run_dir": start.run_dir.name}
        config = {**start.config, **place}
        self.run.config.update(config, allow_val_change=True)
        return None if self.run.offline else f"W&B: {self.run.url}"

    def scalars(self, metrics: Mapping[str, float | int], place: AxisValues) -> None:
        self._hide_panels(metrics)
        self.run.log({**metrics, **place})

    def table(
        self, name: str, headings: Sequence[str], rows: Rows, place: AxisValues, *, grows: bool = False
    ) -> None:
        # A logged table is immutable; an incremental one logs its new rows.
        if not grows or name not in self._tables:
            self._tables[name] = self._wandb.Table(
                columns=list(headings), log_mode="INCREMENTAL" if grows else "IMMUTABLE"
            )
        table = self._tables[name]
        for row in rows:
            table.add_data(*row)
        self.run.log({name: table, **place})

    def figures(self, pictures: Sequence[Picture], place: AxisValues) -> None:
        images = {p.key: self._wandb.Image(pixels(p.figure), caption=p.caption) for p in pictures}
        self.run.log({**images, **place})

    def file(self, path: Path, kind: FileKind) -> None:
        if kind == "model" and not self.log_model:
            return
        artifact = self._wandb.Artifact(f"{kind}-{self.run.id}", type=kind)
        if path.is_dir():
            artifact.add_dir(str(path), policy="immutable")  # checkpoints do not change, so no copy is needed
        else:
            artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    def close(self, is_complete: bool) -> str | None:
        try:
            is_offline = self.run.offline
            self.run.finish(exit_code=0 if is_complete else 1)
        except Exception:
            # At exit wandb would write to its service again, and print a traceback if the service is gone.
            with suppress(Exception):
                end_service(self._wandb.teardown)
            raise
        for path in self._sent:  # already uploaded; a sync would upload it again
            path.with_suffix(SYNCED).touch()
        return f"to upload to W&B: wandb sync {self.run_dir / 'wandb'}" if is_offline else None

    def _define_metrics(self) -> None:
        """Define the x axis of all panels, and which metrics keep their best value."""
        self.run.define_metric("*", step_metric=TOKENS)
        for axis in AXES:
            self.run.define_metric(axis, hidden=True)
        if self.run.sweep_id is None:  # the metric of a W&B sweep must be one number
            for name in WITH_BEST:
                self.run.define_metric(name, step_metric=TOKENS, summary="last,max")

    def _hide_panels(self, metrics: Mapping[str, float | int]) -> None:
        # By exact names, as W&B does not say which of two patterns that match, this one or "*", it takes.
        for name in metrics.keys() - self._seen:
            if HIDDEN.fullmatch(name):
                self.run.define_metric(name, step_metric=TOKENS, hidden=True)
        self._seen |= metrics.keys()

    def _init(self, run_id: str) -> Any:
        try:
            return self._init_in(self._mode(), run_id)
        except Exception as error:
            if self.offline:
                raise
            log.warning("W&B is not reachable; this run is logged offline in its folder: %s", error)
            with suppress(TimeoutError):  # a second service is then started
                end_service(self._wandb.teardown)  # the first one keeps the id in use
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
                console="off",  # do not capture the progress bar
                silent=True,  # we print the messages for users
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=self.finish_timeout_s,
                finish_timeout_raises=True,
            ),
        )


def end_service(teardown: Callable[[], None]) -> None:
    """Stop wandb's service process, with a timeout, because `teardown` waits for uploads without one.

    Raises:
        TimeoutError: it does not stop in time.
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
        raise TimeoutError(f"wandb's service did not stop within {TEARDOWN_TIMEOUT_S:g} seconds")
