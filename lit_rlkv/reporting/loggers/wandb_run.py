"""Weights & Biases: one W&B run per run folder, also across resumes; offline without an account."""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from lit_rlkv.files import read_if_there, read_json, write_atomically
from lit_rlkv.reporting.loggers import FileKind, Rows, RunLogger, RunStart
from lit_rlkv.reporting.pictures import Picture
from lit_rlkv.reporting.plots.style import pixels
from lit_rlkv.reporting.run_metrics import AXES, ITERATION, TOKENS, AxisValues
from lit_rlkv.settings import Bool, PositiveInt, dataclass

log = logging.getLogger(__name__)

FILE_NAME = "wandb.json"
"""File in the run's folder with the id of the W&B run."""
FORBIDDEN = "/\\#?%:"
"""Characters that W&B does not allow in project names."""
INIT_TIMEOUT_S, FINISH_TIMEOUT_S = 60.0, 300.0
"""Longest waits for the service at the start, and for uploads at the end; the rest can be synced later."""


def _read_id(path: Path) -> str | None:
    """Return the id of the W&B run in FILE_NAME; it becomes part of paths."""
    found = read_json(path)["id"]
    if not isinstance(found, str) or not re.fullmatch(r"[\w.-]+", found):
        raise ValueError(f"{found!r} is no id of a W&B run")
    return found


@dataclass(eq=False)
class WandbRun(RunLogger):
    """Logs metrics over sampled tokens, a table of samples, figures, and files as artifacts.

    W&B only appends, with its own step, so our axes are logged as metrics. A resumed run continues its W&B
    run and logs what W&B does not have. W&B cannot look into a part that was kept offline: a resume replaces
    it by one with all iterations, without the figures of before.

    Raises:
        ValueError: an argument is invalid.
    """

    project: str
    """of W&B"""
    entity: str | None = None
    """a team or user; null: the account's default"""
    name: str | None = None
    """for people; null: the name of the run's folder"""
    group: str | None = None
    """name that runs of one setting share; null: none"""
    tags: tuple[str, ...] | None = None
    """labels of the run; null: none"""
    offline: Bool | None = None
    """keep the run in its folder, for `wandb sync`; null: if wandb finds no account"""
    log_model: Bool = False
    """upload the last checkpoint"""
    figures_every: PositiveInt | None = None
    """iterations between figures; null: at the end only"""

    def __post_init__(self) -> None:
        if not self.project or any(character in FORBIDDEN for character in self.project):
            raise ValueError(
                f"project must be a W&B project name without {' '.join(FORBIDDEN)}, got {self.project!r}"
            )

    def open(self, start: RunStart) -> str | None:
        import wandb  # imported here, because it takes a second and is optional

        self._wandb = wandb
        self.run_dir = start.run_dir
        id_file = start.run_dir / FILE_NAME
        kept_id = read_if_there(id_file, _read_id, None)
        self.run = self._init(kept_id or uuid4().hex[:8])
        write_atomically(id_file, json.dumps({"id": self.run.id}))  # a sweep agent chooses the id itself
        is_uploaded = self._remove_offline_parts()
        if not (self.run.offline or self.run.disabled):
            self.last_iteration = int(self.run.summary.get(ITERATION, 0))
        elif is_uploaded:
            self.last_iteration = start.resumed_at
        self.run.define_metric("*", step_metric=TOKENS)
        for axis in AXES:
            self.run.define_metric(axis, hidden=True)
        origin = {"environment": dict(start.environment), "run_dir": start.run_dir.name}
        self.run.config.update({**start.config, **origin}, allow_val_change=True)
        return None if self.run.offline else f"W&B: {self.run.url}"

    def scalars(self, metrics: Mapping[str, float | int], place: AxisValues) -> None:
        self.run.log({**metrics, **place})

    def table(self, name: str, headings: Sequence[str], rows: Rows, place: AxisValues) -> None:
        table = self._wandb.Table(columns=list(headings), data=[list(row) for row in rows])
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
        is_offline = self.run.offline
        self.run.finish(exit_code=0 if is_complete else 1)
        return f"to upload to W&B: wandb sync {self.run_dir / 'wandb'}" if is_offline else None

    def _remove_offline_parts(self) -> bool:
        """Remove earlier offline parts of this run; return True if some were uploaded, which stay."""
        own, is_uploaded = Path(self.run.dir).parent.name, False
        for part in self.run_dir.glob(f"wandb/offline-run-*-{self.run.id}*"):
            if any(part.glob("*.synced")):  # written by `wandb sync`
                is_uploaded = True
            elif part.name != own and not self.run.disabled:
                shutil.rmtree(part)
        return is_uploaded

    def _init(self, run_id: str) -> Any:
        """Start the W&B run; offline if that was asked for, or if there is no account or no connection."""
        is_offline = self.offline
        try:
            if is_offline is None and "WANDB_MODE" not in os.environ:  # which wandb reads
                is_offline = not self._wandb.login(prompt=False)
            return self._init_in(
                None if is_offline is None else "offline" if is_offline else "online", run_id
            )
        except Exception as error:
            if self.offline:
                raise
            log.warning("W&B is not reachable; this run is logged offline in its folder: %s", error)
            self._wandb.teardown()  # its service keeps the id in use
            return self._init_in("offline", run_id)

    def _init_in(self, mode: Literal["online", "offline"] | None, run_id: str) -> Any:
        settings = self._wandb.Settings(
            console="off",  # do not capture the progress bar
            silent=True,  # we print the messages for users
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
        )
        return self._wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group,
            tags=list(self.tags or ()),
            id=run_id,
            name=self.name or self.run_dir.name,
            dir=str(self.run_dir),
            mode=mode,
            resume="allow",
            reinit="create_new",
            settings=settings,
        )
