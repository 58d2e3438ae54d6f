"""python -m lit_rlkv.sweep FILE: run a W&B sweep file on this machine, or hand it to W&B."""

import argparse
import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

from lit_rlkv.config import ConfigError
from lit_rlkv.reporting.progress import stderr_console
from lit_rlkv.runs.lock import FolderLock
from lit_rlkv.sweeping.checking import check_plan, first_config
from lit_rlkv.sweeping.grid import n_runs
from lit_rlkv.sweeping.handover import hand_over
from lit_rlkv.sweeping.interrupt import interrupts_held
from lit_rlkv.sweeping.job import OUTPUT
from lit_rlkv.sweeping.picture import save_picture
from lit_rlkv.sweeping.plan import Plan, Run, by_key
from lit_rlkv.sweeping.results import TABLE, Ended, results_table, write_results
from lit_rlkv.sweeping.spec import Sweep, read_sweep

MAX_NAME = 60
"""Characters of a folder's name that tell the file and its overrides."""
INTERRUPTED = 130
"""Exit status of a program that Ctrl-C ended."""


def main() -> None:
    """The command line: a mistake ends in one line before any run; Ctrl-C stops the runs and keeps them."""
    args = parse(sys.argv[1:])
    console = stderr_console()
    try:
        plan = Plan(read_sweep(args.file), tuple(args.overrides))
        total = n_runs(plan.sweep, args.max_runs)
        if args.wandb:
            on_wandb(plan, args)
            return
        check_optuna()
        folder = args.dir or Path(first_config(plan).runs_dir) / "sweeps" / folder_name(args.file, plan)
        check_folder(folder)
        check_plan(plan)
        failed = run_sweep(plan, folder, total, args.jobs, console)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on where it was")
        sys.exit(INTERRUPTED)
    if failed:
        sys.exit(
            f"{len(failed)} of {total} runs failed, and the same command tries them again; see "
            f"{failed[0].folder / OUTPUT}"
        )


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; overrides may stand anywhere between them."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_rlkv.sweep",
        description="Run a W&B sweep file on this machine; a sweep that was killed goes on where it was.",
    )
    parser.add_argument("file", type=Path, help="such as sweeps/arms.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for all runs")
    parser.add_argument("--jobs", type=_count, default=1, help="runs at a time, one thread each (1)")
    parser.add_argument("--max-runs", type=_count, help="most runs; the file's run_cap if not given")
    parser.add_argument("--dir", type=Path, help="folder of the sweep (runs_dir/sweeps/NAME)")
    parser.add_argument("--wandb", action="store_true", help="let W&B choose the runs and keep the results")
    return parser.parse_intermixed_args(arguments)


def on_wandb(plan: Plan, args: argparse.Namespace) -> None:
    """Hand the sweep over, and end as its agents do.

    Raises:
        ConfigError: it cannot be handed over.
    """
    if args.dir is not None:
        raise ConfigError(
            f"--dir={args.dir} has no meaning with --wandb, which keeps the results itself; leave one out, "
            "or give runs_dir=... for the folders of the runs"
        )
    check_plan(plan)
    n_failed = hand_over(plan, args.jobs, args.max_runs)
    if n_failed:
        sys.exit(f"{n_failed} of {args.jobs} agents of W&B failed; see what they wrote above")


def check_optuna() -> None:
    """Refuse to begin without the package of the extra."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError('sweeps need the package optuna, which is missing; pip install -e ".[sweep]"')


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written, without making it yet.

    Raises:
        ConfigError: it cannot be written.
    """
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    try:
        with TemporaryDirectory(dir=there):
            pass  # as permissions alone do not tell of a file system
    except OSError as error:
        raise ConfigError(
            f"the sweep would be in {folder}, which cannot be written: {error}; give another --dir"
        ) from error


def run_sweep(plan: Plan, folder: Path, total: int, n_jobs: int, console: Console) -> list[Run]:
    """Run what is left of a sweep in its folder, and show what it found; returns the runs that failed.

    Raises:
        ConfigError: the folder belongs to another sweep, or another process sweeps there.
    """
    from lit_rlkv.sweeping.ledger import Ledger  # here: what needs the package of an extra
    from lit_rlkv.sweeping.scheduler import FitLauncher, Scheduler

    folder = folder.resolve()
    with FolderLock("--dir=") as lock:
        lock.take(folder)
        scheduler = Scheduler(Ledger(plan, folder, total), FitLauncher(plan), console, n_jobs)
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
    """Write the results, draw them, and print the table."""
    if not ended:
        return
    write_results(folder, sweep, ended)
    picture = save_picture(folder, sweep, ended)
    console.print(results_table(sweep, ended))
    where = f"results: {folder / TABLE}" + (f"\npicture: {picture}" if picture else "")
    console.print(Text(where))


def folder_name(file: Path, plan: Plan) -> str:
    """The file's name and the overrides, which make it another sweep; many are told apart by a digest."""
    overrides = tuple(by_key(plan.overrides))
    name = re.sub(r"[^\w.-]+", "_", "-".join([file.stem, *overrides])).strip("_")
    digest = hashlib.blake2b(repr(overrides).encode(), digest_size=4).hexdigest()
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}-{digest}"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no count; give a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    main()
