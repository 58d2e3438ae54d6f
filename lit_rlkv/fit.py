"""python -m lit_rlkv.fit: compose the config, build the parts, run the stages, write the report."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from lightning.fabric import Fabric
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lit_rlkv.config import (
    CONF_DIR,
    ConfigError,
    check_command_line,
    check_config,
    check_folders,
    check_keys,
)
from lit_rlkv.config.fabric_rules import check_shares
from lit_rlkv.experience.reward import RewardsFailedError
from lit_rlkv.faults import EXIT_CODE, InterruptedRunError, Interruption, NonFiniteError
from lit_rlkv.files import sweep_partial, write_atomically
from lit_rlkv.out_of_memory import MemoryExhaustedError
from lit_rlkv.reporting.progress import stderr_console
from lit_rlkv.reporting.summary import summary_table
from lit_rlkv.runs.checkpoint import CheckpointDir, RetentionPolicy
from lit_rlkv.runs.context import (
    CHECKPOINTS,
    CONFIG,
    REPORT,
    build_context,
)
from lit_rlkv.runs.launch import broadcast_from_rank_zero, ending_together, launch, make_fabric
from lit_rlkv.runs.lock import FolderLock
from lit_rlkv.runs.preflight import check_reward_functions
from lit_rlkv.runs.results import Results
from lit_rlkv.runs.resume import AUTO, config_to_save, found, resumed, warn_of_other_ranks
from lit_rlkv.runs.run_logger import start_logger
from lit_rlkv.runs.saver import newest
from lit_rlkv.runs.starting_model import SFT_MODELS, find_starting_model
from lit_rlkv.stages.run import Run

LOG = "fit.log"
ASKED = ".asked_to_end"
"""In the folder of a run that has saved itself and ended because it was asked to, until it goes on."""

log = logging.getLogger(__name__)


def fit(
    cfg: DictConfig,
    run_dir: Path,
    console: Console,
    *,
    resumes: bool = False,
    fabric: Fabric | None = None,
    interruption: Interruption | None = None,
) -> Results:
    """Run the stages of a checked config in a folder that holds everything the run leaves behind.

    Args:
        fabric: launched; None takes one process.

    Raises:
        ConfigError: the folder holds a run already and this one does not resume it.
        InterruptedRunError: the run was asked to end; its state is saved.
    """
    if not resumes and (run_dir / CONFIG).exists():
        raise ConfigError(
            f"{run_dir} holds a run already; give resume={run_dir} to go on with it, or another folder"
        )
    parts = build_context(cfg, fabric)
    # What is on the disk may change while the ranks look at it, so that one of them looks for all.
    start = broadcast_from_rank_zero(parts.fabric, lambda: find_starting_model(cfg, run_dir))
    check_shares(cfg, parts.fabric.world_size)
    check_reward_functions(parts)
    keep = cfg.callbacks
    keeping = RetentionPolicy(keep.keep_last, keep.keep_best, keep.best_metric, keep.best_mode)
    checkpoints = CheckpointDir(run_dir / CHECKPOINTS, keeping)
    resume_from = broadcast_from_rank_zero(parts.fabric, lambda: newest(checkpoints))
    if resume_from is not None:
        console.print(f"go on after iteration {resume_from.iteration} of {run_dir}")
        warn_of_other_ranks(resume_from, parts.fabric.world_size)
    parts.fabric.barrier()  # all have looked at the folder before the first writes
    if parts.fabric.is_global_zero:
        run_dir.mkdir(parents=True, exist_ok=True)
        kept = config_to_save(cfg, run_dir)
        write_atomically(run_dir / CONFIG, OmegaConf.to_yaml(kept, resolve=True))
    resumed_at = 0 if resume_from is None else resume_from.iteration
    with parts.panel, start_logger(parts, run_dir, resumed_at, console) as logger:
        interruption = interruption or Interruption()
        run = Run(parts, run_dir, checkpoints, resume_from, logger, console, interruption)
        return run.go(start)


def main() -> None:
    """The command line: errors of the config end in one line, before any work."""
    try:
        asked = check_command_line("config", sys.argv[1:])
        if asked is not None:
            check_folders(asked)  # Hydra makes what they name
    except ConfigError as error:
        sys.exit(f"error: {error}")
    run_command_line()


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
def run_command_line(cfg: DictConfig) -> None:
    """What a command line that composes asks for."""
    console = stderr_console()
    hydra_cfg = HydraConfig.get()
    run_dir = Path(hydra_cfg.runtime.output_dir)
    interruption = Interruption()
    try:
        with interruption.listening():
            run_dir, results = fit_as_asked(cfg, run_dir, hydra_cfg, console, interruption)
    except (ConfigError, NonFiniteError, RewardsFailedError) as error:
        sys.exit(f"error: {error}")
    except MemoryExhaustedError as error:
        log.error("what did not find memory:", exc_info=error)
        sys.exit(f"error: {error}")
    except InterruptedRunError as error:
        console.print(f"{error}: saved, and ended with exit code {EXIT_CODE}; resume=... goes on")
        # A launcher takes any other rank's code for a failure, and may end the first before it is done.
        sys.exit(EXIT_CODE if not console.quiet else 0)
    finally:
        discard_if_empty(run_dir)
    console.print(summary_table(results.before, results.after, results.stage_seconds, results.reward_model))
    console.print(f"report: {run_dir / REPORT}")


def fit_as_asked(
    cfg: DictConfig, run_dir: Path, hydra_cfg: HydraConf, console: Console, interruption: Interruption
) -> tuple[Path, Results]:
    """A new run in its folder, or the one that `resume` means; the folder, and what was found.

    Raises:
        ConfigError: a mistake in the config, before any work.
        InterruptedRunError: a signal asked the run to end.
    """
    check_folders(cfg)
    old_dir: Path | None = None
    is_auto = cfg.resume == AUTO  # a run's own config says how that was begun
    if cfg.resume is None or is_auto:
        check_keys(cfg, hydra_cfg.runtime.choices, hydra_cfg.overrides.task)
    else:
        old_dir, cfg = resumed(cfg, hydra_cfg.overrides.task)
    check_config(cfg)
    fabric = make_fabric(cfg)
    # One rank that ends would leave the others waiting, also while they start.
    is_held = interruption.held(fabric.world_size > 1)
    with is_held, ending_together(fabric), FolderLock() as lock:
        launch(fabric)
        console.quiet = not fabric.is_global_zero
        # Hydra may have given each rank a folder of its own; the first one's is that of the run.
        own_dir, run_dir = run_dir, broadcast_from_rank_zero(fabric, lambda: run_dir)
        old_dir = broadcast_from_rank_zero(fabric, lambda: lock_run_dir(cfg, run_dir, old_dir, lock, is_auto))
        if is_auto and old_dir is None:
            console.print(f"no run with this config to go on with; a new one in {run_dir}")
        run_dir = old_dir or run_dir
        if own_dir != run_dir:
            discard_if_empty(own_dir)
        if fabric.is_global_zero:
            logging.getLogger().addHandler(logging.FileHandler(run_dir / LOG, delay=True))
        resumes = old_dir is not None
        with mark_interrupted(run_dir, is_first=fabric.is_global_zero):
            results = fit(cfg, run_dir, console, resumes=resumes, fabric=fabric, interruption=interruption)
        return run_dir, results


@contextmanager
def mark_interrupted(run_dir: Path, *, is_first: bool) -> Iterator[None]:
    """A block in which a run goes on; if it ends because it was asked to, `ASKED` says so.

    The exit code need not: srun gives the highest of all ranks, also of one that it killed on its way out.
    """
    if is_first:
        (run_dir / ASKED).unlink(missing_ok=True)
    try:
        yield
    except InterruptedRunError:
        if is_first and (run_dir / CONFIG).is_file():  # else there is nothing to go on with
            with suppress(OSError):
                (run_dir / ASKED).touch()
        raise


def lock_run_dir(
    cfg: DictConfig, run_dir: Path, old_dir: Path | None, lock: FolderLock, is_auto: bool
) -> Path | None:
    """The folder of the run to go on with, None for a new one; locked, and without what killed runs left.

    Raises:
        ConfigError: another process is at work there; or the folder given for `resume=auto` has another run.
    """
    if is_auto:
        old_dir = found(cfg, run_dir, lock)
    else:
        lock.take(old_dir or run_dir)
    for root in (old_dir or run_dir, Path(cfg.runs_dir) / SFT_MODELS):
        sweep_partial(root, is_shared=True)  # evaluations and exports write beside a run, without its lock
    return old_dir


def discard_if_empty(folder: Path) -> None:
    """Hydra makes the folder of a run before anything is checked."""
    with suppress(OSError):  # it is not empty, or another rank has done it
        folder.rmdir()


if __name__ == "__main__":
    main()
