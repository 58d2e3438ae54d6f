"""python -m lit_rlkv.sweep FILE: run a W&B sweep file on this machine, or hand it to W&B."""

import argparse
import shlex
import sys
from pathlib import Path

from lit_rlkv.cli import announce_imports, exit_in_one_line
from lit_rlkv.config import ConfigError
from lit_rlkv.interrupts import ends_on_ctrl_c, exits_on_ctrl_c


def main() -> None:
    """Run the command line; Ctrl-C stops all runs, which the same command resumes."""
    command = shlex.join(["python", "-m", "lit_rlkv.sweep", *sys.argv[1:]])
    with ends_on_ctrl_c(f"interrupted before the sweep began; start it with {command}"):
        args = parse(sys.argv[1:])
        announce_imports()
        from lit_rlkv.sweeping.command import sweep  # imports torch

        with exits_on_ctrl_c(f"interrupted; resume with {command}"), exit_in_one_line(ConfigError):
            sweep(args)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; overrides may stand anywhere between the options."""
    parser = argparse.ArgumentParser(
        prog="python -m lit_rlkv.sweep",
        description="Run a W&B sweep file on this machine; the same command resumes an interrupted sweep.",
    )
    parser.add_argument("file", type=Path, help="such as sweeps/arms.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for all runs")
    parser.add_argument("--jobs", type=_count, default=1, help="runs at a time, one thread each (1)")
    parser.add_argument("--max-runs", type=_count, help="most runs; the file's run_cap if not given")
    parser.add_argument("--dir", type=Path, help="folder of the sweep (runs_dir/sweeps/NAME)")
    parser.add_argument("--wandb", action="store_true", help="let W&B choose the runs and keep the results")
    return parser.parse_intermixed_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


if __name__ == "__main__":
    main()
