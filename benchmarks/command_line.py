"""Options of the benchmarks' command lines; the help of a script is its docstring."""

import argparse
from collections.abc import Sequence
from typing import Any

import record


class Parser(argparse.ArgumentParser):
    """A parser that shows the docstring of a script as it is written, and decides whether rows are recorded.

    Args:
        description: the docstring
        records: name of the rows that the script records, if it does
    """

    def __init__(self, description: str | None, records: str | None = None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        if records is not None:
            told = f"append rows to benchmarks/results/{records}.jsonl; without it no file changes"
            self.add_argument("--record", action="store_true", help=told)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        found, others = super().parse_known_args(args, namespace)
        record.is_on = getattr(found, "record", False)
        if record.is_on and getattr(found, "fast", False):
            self.error("--fast is for a look at the output; leave it out with --record")
        return found, others


def add_restart_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that a restart continues."""
    parser.add_argument("--minutes", type=float, help="stop after this time; a restart measures the rest")
    parser.add_argument("--again", action="store_true", help="measure what is in the record already, too")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add the device; `complete` gives its default."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with CUDA where there is a GPU."""
    if args.device is None:
        import torch  # not at the top: Triton reads its environment when it is imported

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args
