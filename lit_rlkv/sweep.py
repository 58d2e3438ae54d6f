"""python -m lit_rlkv.sweep FILE: run a W&B sweep file on this machine, without an account."""

import argparse
import importlib.util
import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from omegaconf import DictConfig

from lit_rlkv.cli import compose_arguments, run_command
from lit_rlkv.config import ConfigError, check_keys, check_saved_code, require
from lit_rlkv.config.keys import check_effects

if TYPE_CHECKING:
    from lit_rlkv.runs.preflight import CheckedConfig
    from lit_rlkv.sweeping.sweep_file import Sweep, Values

DESCRIPTION = """\
Run a W&B sweep file on this machine; the same command resumes it, and tries failed runs again.

  python -m lit_rlkv.sweep sweeps/arms.yaml --jobs 2               all its runs, two at a time
  python -m lit_rlkv.sweep sweeps/arms.yaml task=sorting           with an override for all runs
  python -m lit_rlkv.sweep sweeps/learning_rate.yaml --max-runs 8  at most 8 runs

With an account: wandb sweep FILE, then wandb agent ID."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; python -m lit_rlkv.sweep --help shows how\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; overrides may stand anywhere between the options.

    Raises:
        ConfigError: optuna is not installed.
    """
    parser = OneLineParser(
        prog="python -m lit_rlkv.sweep",
        description=DESCRIPTION,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=110),
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="a sweep file, or the name of a shipped one, such as arms")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", type=_override, help="for all runs")
    parser.add_argument(
        "--jobs", metavar="N", type=_count, default=1, help="runs at a time, one thread each (1)"
    )
    parser.add_argument(
        "--max-runs", metavar="N", type=_count, help="most runs; the file's run_cap if not given"
    )
    parser.add_argument("--dir", metavar="FOLDER", type=Path, help="of the sweep (runs_dir/sweeps/FILE)")
    parsed = parser.parse_intermixed_args(arguments)
    require(importlib.util.find_spec("optuna") is not None, "sweeps need optuna; pip install -e '.[sweep]'")
    return parsed


def _override(text: str) -> str:
    if "=" not in text and not text.startswith("~"):
        raise argparse.ArgumentTypeError(f"{text!r} sets nothing; write {text}=...")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def sweep(args: argparse.Namespace) -> None:
    """Check and run a sweep, show its results, and exit with an error if a run failed.

    Raises:
        ConfigError: a mistake in the file or in an argument, or another process sweeps in the folder.
    """
    from lit_rlkv.reporting.progress import stderr_console
    from lit_rlkv.runs.lock import FolderLock
    from lit_rlkv.sweeping.results import results_table, write_results
    from lit_rlkv.sweeping.runs import SweepStudy, Workers
    from lit_rlkv.sweeping.sweep_file import find_sweep, read_sweep

    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    plan = read_sweep(find_sweep(args.file), tuple(args.overrides))
    total = plan.n_runs(args.max_runs)
    check(plan)
    runs_dir = Path(compose(plan, plan.cells[0], Path("unused")).runs_dir)
    folder = (args.dir or runs_dir / "sweeps" / args.file.stem).resolve()
    console = stderr_console()
    with FolderLock("--dir=") as lock:
        lock.take(folder)
        study = SweepStudy(plan, folder, total)
        console.print(f"{total} runs, {len(study.ended())} done, in {folder}", markup=False)
        workers = Workers(study, args.jobs, console)
        try:
            workers.run()
        finally:
            if study.ended():
                console.print(results_table(plan, study.ended()))
                for path in write_results(study):
                    console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    if workers.failed:
        sys.exit(
            f"{len(workers.failed)} of {total} runs failed, and the same command tries them again; see "
            f"{workers.failed[0].log}"
        )
    if all(run.value(plan.metric.name) is None for run in study.ended()):
        sys.exit(f"no run has a value of metric={plan.metric.name}; name a column of metrics.csv in the file")


def compose(sweep: "Sweep", values: "Values", folder: Path) -> DictConfig:
    """Return the config of a run after the checks that fit makes.

    Raises:
        ConfigError: it does not compose, or names code that the command line does not trust.
    """
    cfg, hydra_cfg = compose_arguments("config", sweep.arguments(values, folder))
    check_saved_code(cfg.reward.functions)  # a file is no command line
    check_keys(cfg, hydra_cfg.runtime.choices, list(hydra_cfg.overrides.task))
    check_effects(cfg, hydra_cfg.overrides.task)
    return cfg


def check(sweep: "Sweep") -> None:
    """Check every listed combination, at both ends of all ranges.

    Raises:
        ConfigError: naming the combination that does not work.
    """
    from optuna.distributions import CategoricalDistribution

    from lit_rlkv.reporting.progress import track
    from lit_rlkv.runs.preflight import checked_config

    ranges = {key: each for key, each in sweep.space.items() if not isinstance(each, CategoricalDistribution)}
    ends = [{key: str(getattr(each, end)) for key, each in ranges.items()} for end in ("low", "high")]
    todo = [cell | end for cell in sweep.cells for end in (ends if ranges else [{}])]
    with track("check", len(todo), quiet_s=2.0) as advance:
        for values in todo:
            try:
                _check_metric(sweep.metric.name, checked_config(compose(sweep, values, Path("unused"))))
            except ConfigError as error:
                named = " ".join(f"{key}={value}" for key, value in values.items())
                raise ConfigError(f"{error} (in the run with {named})") from error
            advance()


def _check_metric(name: str, cfg: "CheckedConfig") -> None:
    """Check that the final evaluation will have a metric that is one of it."""
    is_known = "eval" in cfg.stages and ("accuracy" not in name or cfg.accuracy is not None)
    require(
        not name.startswith("eval/") or is_known,
        f"metric={name} needs the stage eval and, for an accuracy, answers or reward.accuracy; add them, or "
        "write another one into the file, such as metric: {name: reward, goal: maximize}",
    )


def main() -> None:
    """Run the command line; Ctrl-C stops all runs, which the same command resumes."""
    command = shlex.join(["python", "-m", "lit_rlkv.sweep", *sys.argv[1:]])
    interrupted = f"interrupted; resume with {command}"
    run_command(parse, ("lit_rlkv.sweeping.runs",), sweep, interrupted=interrupted)


if __name__ == "__main__":
    main()
