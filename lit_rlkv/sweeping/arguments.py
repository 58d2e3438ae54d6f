"""Arguments and help of `python -m lit_rlkv.sweep`; imports neither torch nor transformers."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from lit_rlkv.config.help import HELP, HELP_ALL, aligned, schema_help
from lit_rlkv.sweeping.hyperband import Hyperband
from lit_rlkv.sweeping.metric import Metric
from lit_rlkv.sweeping.sweep_file import SweepFile

EXAMPLES = """\
Run a W&B sweep file on this machine; the same command resumes an interrupted sweep.

Examples
  python -m lit_rlkv.sweep sweeps/arms.yaml --jobs 2               all its runs, two at a time
  python -m lit_rlkv.sweep sweeps/arms.yaml task=sorting           with an override for all runs
  python -m lit_rlkv.sweep sweeps/learning_rate.yaml --max-runs 8  at most 8 runs
  python -m lit_rlkv.sweep sweeps/arms.yaml --wandb                W&B chooses the runs"""
ARGUMENTS = {
    "FILE": "a sweep file, or the name of a shipped one, such as arms",
    "KEY=VALUE": "overrides for all runs: the keys of python -m lit_rlkv.fit",
    "--jobs N": "runs at a time, one thread each (1)",
    "--max-runs N": "most runs; the file's run_cap if not given",
    "--dir FOLDER": "folder of the sweep (runs_dir/sweeps/NAME)",
    "--wandb": "let W&B choose the runs and keep the results",
    "--help, -h": "this text",
    "--help-all": "also the keys of a sweep file",
}
"""Every argument with its meaning."""
NODES = {"metric": Metric, "early_terminate": Hyperband}
"""Schemas of the nodes of a sweep file."""


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; python -m lit_rlkv.sweep --help shows how\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; overrides may stand anywhere between the options."""
    if {*HELP, HELP_ALL} & {*arguments}:
        sys.stdout.write(f"{help_text(is_full=HELP_ALL in arguments)}\n")
        sys.exit()
    parser = OneLineParser(prog="python -m lit_rlkv.sweep", add_help=False, allow_abbrev=False)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", type=_override)
    parser.add_argument("--jobs", type=_count, default=1)
    parser.add_argument("--max-runs", type=_count)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--wandb", action="store_true")
    return parser.parse_intermixed_args(arguments)


def help_text(*, is_full: bool) -> str:
    """Return the help, with the keys of a sweep file if it is to be full."""
    lines = [EXAMPLES, "", "Arguments"]
    for name, meaning in ARGUMENTS.items():
        lines += aligned(name, meaning, 18)
    if is_full:
        lines += ["", "Keys of a sweep file", *schema_help(SweepFile)]
        for name, schema in NODES.items():
            lines += schema_help(schema, f"{name}.")
        lines += ["", "Keys of the runs: python -m lit_rlkv.fit --help-all"]
    return "\n".join(lines)


def _override(text: str) -> str:
    if "=" not in text and not text.startswith("~"):
        raise argparse.ArgumentTypeError(f"{text!r} sets nothing; write {text}=...")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)
