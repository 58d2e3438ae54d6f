"""Options of the benchmarks' command lines; the help of a script is its docstring."""

import argparse


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows the docstring of a script as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_restart_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that a restart continues."""
    parser.add_argument("--minutes", type=float, help="stop after this time; a restart measures the rest")
    parser.add_argument("--again", action="store_true", help="measure what is in the record already, too")


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add the device, and whether rows are kept; `complete` gives both their defaults."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument(
        "--record", action=argparse.BooleanOptionalAction, help="append to results/; default: on CUDA"
    )


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments with CUDA where there is a GPU, and a record where CUDA is used."""
    if args.device is None:
        import torch  # not at the top: Triton reads its environment when it is imported

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.record = args.device == "cuda" if args.record is None else args.record
    return args
