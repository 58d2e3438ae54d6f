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
