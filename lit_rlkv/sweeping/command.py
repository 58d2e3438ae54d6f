"""Run a sweep from its parsed arguments: check, schedule the runs, write and draw the results."""

import argparse
import hashlib
import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

from lit_rlkv.config import ConfigError
from lit_rlkv.reporting.progress import stderr_console
from lit_rlkv.runs.lock import FolderLock
from lit_rlkv.sweeping.job import OUTPUT
from lit_rlkv.sweeping.picture import save_picture
from lit_rlkv.sweeping.plan import Plan, Run, by_key, check_plan, first_config
from lit_rlkv.sweeping.results import TABLE, Ended, results_table, write_results
from lit_rlkv.sweeping.sweep_file import Sweep, find_sweep, n_runs, read_sweep
from lit_rlkv.sweeping.wandb_agents import run_on_wandb

MAX_NAME = 60
"""Characters of a folder's name that show the file and its overrides."""


def sweep(args: argparse.Namespace) -> None:
    """Run a sweep here, or hand it to W&B; exit with an error if a run fails.

    Raises:
        ConfigError: a mistake in the sweep file or in an argument.
    """
    plan = Plan(read_sweep(find_sweep(args.file)), tuple(args.overrides))
    total = n_runs(plan.sweep, args.max_runs)
    if args.wandb:
        on_wandb(plan, args)
        return
    check_optuna()
    folder = args.dir or Path(first_config(plan).runs_dir) / "sweeps" / folder_name(args.file, plan)
    check_folder(folder)
    check_plan(plan)
    failed = run_sweep(plan, folder, total, args.jobs, stderr_console())
    if failed:
        sys.exit(
            f"{len(failed)} of {total} runs failed, and the same command tries them again; see "
            f"{failed[0].folder / OUTPUT}"
        )


def on_wandb(plan: Plan, args: argparse.Namespace) -> None:
    """Run the sweep on W&B, and exit as its agents do.

    Raises:
        ConfigError: W&B cannot run it.
    """
    if args.dir is not None:
        raise ConfigError(
            f"--dir={args.dir} has no effect with --wandb, where W&B keeps the results; leave one out, "
            "or give runs_dir=... for the folders of the runs"
        )
    check_plan(replace(plan, on_wandb=True))
    n_failed = run_on_wandb(plan, args.jobs, args.max_runs)
    if n_failed:
        sys.exit(f"{n_failed} of {args.jobs} agents of W&B failed; see their output above")


def check_optuna() -> None:
    """Check that Optuna, a package of the extra `sweep`, is installed."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError('sweeps need the package optuna, which is missing; pip install -e ".[sweep]"')


def check_folder(folder: Path) -> None:
    """Check that a folder can be written, without making it yet.

    Raises:
        ConfigError: it cannot be written.
    """
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    try:
        with TemporaryDirectory(dir=there):
            pass  # permissions alone do not show a read-only file system
    except OSError as error:
        raise ConfigError(
            f"the sweep would be in {folder}, which cannot be written: {error}; give another --dir"
        ) from error


def run_sweep(plan: Plan, folder: Path, total: int, n_jobs: int, console: Console) -> list[Run]:
    """Run the rest of a sweep in its folder, show its results, and return the failed runs.

    Raises:
        ConfigError: the folder belongs to another sweep, or another process sweeps there.
    """
    from lit_rlkv.sweeping.scheduler import FitLauncher, Scheduler, interrupts_held  # these import Optuna
    from lit_rlkv.sweeping.study import SweepStudy

    folder = folder.resolve()
    with FolderLock("--dir=") as lock:
        lock.take(folder)
        scheduler = Scheduler(SweepStudy(plan, folder, total), FitLauncher(plan), console, n_jobs)
        console.print(
            f"sweep {plan.sweep.name}: {total} runs, {len(scheduler.ended)} done, in {folder}", markup=False
        )
        try:
            with interrupts_held() as check:
                scheduler.run(check)
        finally:
            show(plan.sweep, folder, scheduler.ended, console)
    return [run for run, outcome in scheduler.ended if outcome.state == "failed"]


def show(sweep: Sweep, folder: Path, ended: Ended, console: Console) -> None:
    """Write and draw the results, and print the table."""
    if not ended:
        return
    write_results(folder, sweep, ended)
    try:
        picture = save_picture(folder, sweep, ended)
    except Exception as error:  # the table and the failed runs matter more
        console.print(f"the picture cannot be drawn: {error}", markup=False)
        picture = None
    console.print(results_table(sweep, ended))
    where = f"results: {folder / TABLE}" + (f"\npicture: {picture}" if picture else "")
    console.print(Text(where))


def folder_name(file: Path, plan: Plan) -> str:
    """Return the name of the file and its overrides, or a short form with a digest."""
    overrides = tuple(by_key(plan.overrides))
    name = re.sub(r"[^\w.-]+", "_", "-".join([file.stem, *overrides])).strip("_")
    digest = hashlib.blake2b(repr(overrides).encode(), digest_size=4).hexdigest()
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}-{digest}"
