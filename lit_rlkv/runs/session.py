"""From a checked command line to processes that hold a run folder: new or resumed, launched, locked."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning.fabric import Fabric
from omegaconf import DictConfig
from rich.console import Console

from lit_rlkv.config import AUTO, Config
from lit_rlkv.files import sweep_partial
from lit_rlkv.runs.context import CONFIG
from lit_rlkv.runs.launch import broadcast_from_rank_zero, end_together, launch, make_fabric
from lit_rlkv.runs.lock import FolderLock
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.resume import find_resumable_run, load_resumed_config
from lit_rlkv.runs.signals import InterruptedRunError, Interruption
from lit_rlkv.runs.starting_model import SFT_MODELS

LOG = "fit.log"
INTERRUPTED = ".interrupted"
"""File in a run that a signal ended after it had saved itself; removed when the run is resumed."""


@dataclass(frozen=True)
class Session:
    """The launched processes of a run and the folder that they hold."""

    cfg: Config
    run_dir: Path
    fabric: Fabric
    is_resumed: bool


@contextmanager
def open_session(
    composed: DictConfig,
    run_dir: Path,
    overrides: Sequence[str],
    console: Console,
    interruption: Interruption,
) -> Iterator[Session]:
    """Check the config, start the processes of the run and lock its folder until the block ends.

    Args:
        composed: the config; `resume` names a run, is `auto`, or is None for a new run.
        run_dir: folder of a new run.
        overrides: overrides on the command line.
        console: silenced on every rank but 0.

    Raises:
        ConfigError: a mistake in the config, or another process works in the folder.
        InterruptedRunError: a signal ended the run; its state is saved.
    """
    old_dir: Path | None = None
    is_auto = composed.resume == AUTO
    if composed.resume is not None and not is_auto:
        old_dir, composed = load_resumed_config(composed, overrides)
    cfg = checked_config(composed)
    fabric = make_fabric(cfg)
    # A rank that ended alone would leave the others waiting, also during their start.
    deferred = interruption.deferred(fabric.world_size > 1)
    with deferred, end_together(fabric), FolderLock() as lock:
        launch(fabric)
        console.quiet = not fabric.is_global_zero
        # Each rank may have composed a folder name of its own; the run takes that of rank 0.
        own_dir, run_dir = run_dir, broadcast_from_rank_zero(fabric, lambda: run_dir)
        old_dir = broadcast_from_rank_zero(fabric, lambda: lock_run_dir(cfg, run_dir, old_dir, lock, is_auto))
        if is_auto and old_dir is None:
            console.print(f"no run with this config to resume; a new one in {run_dir}")
        run_dir = old_dir or run_dir
        if own_dir != run_dir:
            discard_if_empty(own_dir)
        if fabric.is_global_zero:
            logging.getLogger().addHandler(logging.FileHandler(run_dir / LOG, delay=True))
        with mark_interrupted(run_dir, is_rank_zero=fabric.is_global_zero):
            yield Session(cfg, run_dir, fabric, is_resumed=old_dir is not None)


@contextmanager
def mark_interrupted(run_dir: Path, *, is_rank_zero: bool) -> Iterator[None]:
    """Leave the file INTERRUPTED if a signal ends the block.

    The exit code does not always say so: srun returns the highest code of all ranks, also of a rank that it
    killed.
    """
    if is_rank_zero:
        (run_dir / INTERRUPTED).unlink(missing_ok=True)
    try:
        yield
    except InterruptedRunError:
        if is_rank_zero and (run_dir / CONFIG).is_file():  # otherwise there is nothing to resume
            with suppress(OSError):
                (run_dir / INTERRUPTED).touch()
        raise


def lock_run_dir(
    cfg: Config, run_dir: Path, old_dir: Path | None, lock: FolderLock, is_auto: bool
) -> Path | None:
    """Lock the folder of the run, remove partial files of killed processes, return the run to resume if any.

    Raises:
        ConfigError: another process works there, or the folder given for `resume=auto` holds another run.
    """
    if is_auto:
        old_dir = find_resumable_run(cfg.source, run_dir, lock)
    else:
        lock.take(old_dir or run_dir)
    for root in (old_dir or run_dir, Path(cfg.runs_dir) / SFT_MODELS):
        sweep_partial(root, is_shared=True)  # evaluations and exports write beside a run, without its lock
    return old_dir


def discard_if_empty(folder: Path) -> None:
    """Remove a run folder in which nothing was written."""
    with suppress(OSError):  # it is not empty, or another rank has removed it
        folder.rmdir()
