"""Start or resume a run: start the processes, find and lock its folder."""

import logging
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from omegaconf import DictConfig
from rich.console import Console

from lit_rlkv import interrupts
from lit_rlkv.config import AUTO, Config, ConfigError, quoted
from lit_rlkv.config.parsing import STAGES
from lit_rlkv.config.resumed import check_same_config, differences, read_config
from lit_rlkv.files import read_if_there, sweep_partial
from lit_rlkv.interrupts import InterruptedRunError, Interruption
from lit_rlkv.reporting.progress import say
from lit_rlkv.reporting.run_metrics import ITERATION, read_metrics
from lit_rlkv.run_files import CHECKPOINTS, CONFIG, METRICS, REPORT
from lit_rlkv.runs.checkpoint import Checkpoint, CheckpointDir
from lit_rlkv.runs.launch import broadcast_from_rank_zero, end_together, launch, make_fabric
from lit_rlkv.runs.lock import BusyError, FolderLock
from lit_rlkv.runs.starting_model import SFT_MODELS

log = logging.getLogger(__name__)
LOG = "fit.log"
INTERRUPTED = ".interrupted"
"""File in a run that a signal ended after it had saved itself; removed when the run is resumed."""


class LogFile(logging.FileHandler):
    """A log file; a full disk costs lines of it, which the console has too, and no traceback for each."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Print nothing."""


def log_to_file(message: str, error: BaseException) -> None:
    """Write an error with its traceback to the run's log file alone."""
    found = (type(error), error, error.__traceback__)
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, message, (), found)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogFile):
            handler.handle(record)


@dataclass(frozen=True)
class Session:
    """The launched processes of a run and the folder that they hold."""

    run_dir: Path
    fabric: Fabric
    is_resumed: bool


@contextmanager
def open_session(
    cfg: Config,
    run_dir: Path,
    old_dir: Path | None,
    console: Console,
    interruption: Interruption,
) -> Iterator[Session]:
    """Start the processes of a run and lock its folder until the block ends.

    Args:
        run_dir: folder of a new run.
        old_dir: folder of the run to resume; None for a new run, or to find one by the config if `cfg.resume`
            is `auto`.
        console: silenced on every rank but 0.

    Raises:
        ConfigError: another process works in the folder.
        InterruptedRunError: a signal ended the run; its state is saved.
    """
    is_auto = old_dir is None and cfg.resume == AUTO
    fabric = make_fabric(cfg)
    # A rank that ended alone would leave the others waiting, also during their start.
    together = interruption.together(fabric.world_size)
    with together, end_together(fabric), FolderLock() as lock:
        launch(fabric)
        console.quiet = not fabric.is_global_zero
        # Each rank may have composed a folder name of its own; the run takes that of rank 0.
        own_dir, run_dir = run_dir, broadcast_from_rank_zero(fabric, lambda: run_dir)
        old_dir = broadcast_from_rank_zero(fabric, lambda: lock_run_dir(cfg, run_dir, old_dir, lock, is_auto))
        if is_auto and old_dir is None:
            say(console, f"no run with this config to resume; a new one in {run_dir}")
        run_dir = old_dir or run_dir
        if own_dir != run_dir:
            discard_if_empty(own_dir)
        # A pipe of that name would wait for a reader; a folder with links was refused by its lock.
        if fabric.is_global_zero and ((run_dir / LOG).is_file() or not (run_dir / LOG).exists()):
            logging.getLogger().addHandler(LogFile(run_dir / LOG, delay=True))
        with mark_interrupted(run_dir, is_rank_zero=fabric.is_global_zero):
            yield Session(run_dir, fabric, is_resumed=old_dir is not None)


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


def find_resumable_run(cfg: DictConfig, run_dir: Path, lock: FolderLock) -> Path | None:
    """Return the run that `resume=auto` resumes: the one in this folder, or the newest with this config.

    Return None if a new run must start. Finished runs do not count, except the one in this folder. The lock
    is then held on the folder of the run.

    Raises:
        ConfigError: `run_dir` holds a run with another config; the error names the differences.
        BusyError: another process works on the run to resume.
    """
    lock.take(run_dir)
    if (run_dir / CONFIG).is_file():
        check_same_config(read_config(run_dir), cfg, run_dir)
        return run_dir
    runs = [path.parent for path in Path(cfg.runs_dir).glob(f"*/{CONFIG}")]
    busy: BusyError | None = None
    for run in sorted(runs, key=lambda run: (run / CONFIG).stat().st_mtime, reverse=True):
        if not _is_unfinished(run, cfg):
            continue
        try:
            lock.take(run)
        except BusyError as error:
            busy = error
        except ConfigError as error:
            log.warning("resume=%s skips a run: %s", AUTO, error)
        else:
            return run
    if busy is not None:
        # The other process may be about to end, as after a requeue; a new run would start from scratch.
        raise busy
    return None


def _is_unfinished(run_dir: Path, cfg: DictConfig) -> bool:
    """True if a run has this config and is not complete; a damaged one costs a warning."""
    try:
        return not is_done(run_dir) and not differences(read_config(run_dir), cfg)
    except ConfigError as error:
        log.warning("resume=%s skips a run: %s", AUTO, error)
        return False


def is_done(run_dir: Path) -> bool:
    """True if a run is complete: its report is there and no iteration is left to train.

    A run that must train for longer has an earlier report.
    """
    if not (run_dir / REPORT).is_file():
        return False
    cfg = read_config(run_dir)
    if "rl" not in cfg.stages:
        return True
    checkpoints = CheckpointDir(run_dir / CHECKPOINTS)
    last = checkpoints.folder_of(cfg.algorithm.n_iterations)
    return any(saved >= last for saved in checkpoints.all())


@contextmanager
def mark_interrupted(run_dir: Path, *, is_rank_zero: bool) -> Iterator[None]:
    """Leave the file INTERRUPTED if a signal of a scheduler ends the block.

    The exit code does not always say so: srun returns the highest code of all ranks, also of a rank that it
    killed.
    """
    if is_rank_zero:
        (run_dir / INTERRUPTED).unlink(missing_ok=True)
    try:
        yield
    except InterruptedRunError as error:
        has_state = (run_dir / CONFIG).is_file()
        if is_rank_zero and has_state and not (error.is_ctrl_c or error.is_finished):
            with suppress(OSError):
                (run_dir / INTERRUPTED).touch()
        raise


def end_of_run(error: InterruptedRunError, run_dir: Path, overrides: Sequence[str] = ()) -> tuple[str, int]:
    """Return the line and the exit code with which an interrupted run ends.

    Args:
        overrides: of the command line; trust in code is not saved, and a saved logger may write into its
            run's folder alone, so resuming needs both again.
    """
    is_saved = (run_dir / CONFIG).is_file()
    if error.is_finished:
        return f"{error}: {interrupts.FINISHED}", interrupts.EXIT_CODE if error.is_ctrl_c else 0
    if not error.is_ctrl_c:
        kept = "saved" if is_saved else "nothing was saved yet"
        return f"{error}: {kept}, exit code {interrupts.REQUEUE}", interrupts.REQUEUE
    if not is_saved:
        return f"{error}; there is nothing to resume", interrupts.EXIT_CODE
    if (run_dir / METRICS).is_file() and has_lost_checkpoints(run_dir, read_config(run_dir)):
        return f"{error}; nothing can be resumed, so start again in another folder", interrupts.EXIT_CODE
    path = os.path.relpath(run_dir) if run_dir.is_relative_to(Path.cwd()) else str(run_dir)
    value = path if re.fullmatch(r"[\w./-]+", path) else quoted(path)
    repeated = [one for one in overrides if re.match(r"\+{0,2}(trusted_modules=|logger[.=])", one)]
    command = shlex.join(["python", "-m", "lit_rlkv.fit", f"resume={value}", *repeated])
    return f"{error}; resume with {command}", interrupts.EXIT_CODE


def has_lost_checkpoints(run_dir: Path, cfg: Any) -> bool:
    """True if a run without checkpoints has trained for so long that it must have had, or missed, one."""
    if CheckpointDir(run_dir / CHECKPOINTS).all():
        return False
    every = cfg.callbacks.checkpoint_every or cfg.algorithm.n_iterations
    rows = read_if_there(run_dir / METRICS, read_metrics, [])
    # The row of an iteration is written before its checkpoint, and the report after all.
    return bool(rows) and (rows[-1][ITERATION] > every or (run_dir / REPORT).is_file())


def config_to_save(cfg: DictConfig, run_dir: Path) -> DictConfig:
    """Return the config to save in a run folder; resuming with fewer stages removes none from it."""
    if not (run_dir / CONFIG).is_file():
        return cfg
    stages = {*read_config(run_dir).stages, *cfg.stages}
    kept = cfg.copy()
    kept.stages = [stage for stage in STAGES if stage in stages]
    return kept


def warn_of_other_ranks(checkpoint: Checkpoint, n_ranks: int) -> None:
    """Warn about the differences if a run resumes with another number of processes."""
    if checkpoint.n_ranks != n_ranks:
        log.warning(
            "this run had %d processes and resumes with %d: prompts, parameters, optimizer and learning rate "
            "are the same; responses use other random numbers, unless rollout.n_shards is set, and sums "
            "differ by rounding",
            checkpoint.n_ranks,
            n_ranks,
        )
