"""python -m lit_rlkv.report RUN [RUN ...] [to=FILE]: draw a run's report again, or compare runs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_rlkv.cli import run_command
from lit_rlkv.config import ConfigError
from lit_rlkv.run_files import CONFIG, REPORT

USAGE = """Draw the report of a run again, or compare runs: curves, evaluations and configs side by side.

Examples
  python -m lit_rlkv.report runs/NAME
  python -m lit_rlkv.report runs/NAME runs/OTHER to=comparison.html

Arguments
  RUN      the folder of a run, such as runs/2026-01-31_12-00-00-000000; it may still be training
  to=FILE  the page to write; by default RUN/report.html, or RUN/report_so_far.html of a run that has not
           ended, or comparison.html here
"""
SO_FAR, COMPARISON = "report_so_far.html", "comparison.html"


@dataclass(frozen=True)
class ReportArguments:
    """The runs to draw, and the page to write."""

    run_dirs: tuple[Path, ...]
    to: Path


def main() -> None:
    """Run the command line. A mistake of the user ends it in one line."""
    modules = [f"lit_rlkv.reporting.{name}" for name in ("comparison", "pictures", "report", "run_folder")]
    run_command(parse, modules, write, libraries="matplotlib", interrupted="interrupted; no page was written")


def parse(arguments: Sequence[str]) -> ReportArguments:
    """Return what the arguments ask for; without any, and with --help, print how to use it and exit.

    Raises:
        ConfigError: there is no run, a folder is no run, or an option is unknown or given twice.
    """
    if not arguments or {"--help", "--help-all", "-h"} & set(arguments):
        sys.stdout.write(USAGE)
        sys.exit(0 if arguments else 2)
    targets = [argument for argument in arguments if argument.startswith("to=")]
    runs = [Path(argument).expanduser() for argument in arguments if argument not in targets]
    if not runs:
        raise ConfigError("a report needs a run folder, got none; give runs/NAME")
    if len(targets) > 1:
        raise ConfigError(f"to= must be given once, got {' '.join(targets)}; leave one")
    for run_dir in runs:
        if not (run_dir / CONFIG).is_file():
            raise ConfigError(
                f"{run_dir} must be the folder of a run, and it has no {CONFIG}; give runs/NAME, and to=FILE "
                "for another place of the page"
            )
    # report.html marks a run as complete, so an unfinished one must not get it.
    to = (
        runs[0] / (REPORT if (runs[0] / REPORT).is_file() else SO_FAR) if len(runs) == 1 else Path(COMPARISON)
    )
    if targets:
        to = Path(targets[0].removeprefix("to=")).expanduser()
        if to.is_dir() or not to.name or (to.exists() and to.suffix != ".html"):
            raise ConfigError(f"{targets[0]} must name a page, and is something else; give to=FILE.html")
        if to.name == REPORT and (to.parent / CONFIG).is_file() and not to.is_file():
            raise ConfigError(f"{targets[0]} would mark an unfinished run as complete; give another to=FILE")
    return ReportArguments(tuple(runs), to)


def write(arguments: ReportArguments) -> None:
    """Write the page and print its path.

    Raises:
        OneLineError: a run is given twice or cannot be read, or the page cannot be written.
    """
    from lit_rlkv.files import write_atomically
    from lit_rlkv.reporting.comparison import render_comparison, run_names
    from lit_rlkv.reporting.pictures import comparison_figures, figures
    from lit_rlkv.reporting.report import render
    from lit_rlkv.reporting.run_folder import read_run

    names = run_names(arguments.run_dirs)
    runs = {name: read_run(path) for name, path in zip(names, arguments.run_dirs, strict=True)}
    try:
        if len(runs) == 1:
            run = runs[names[0]]
            page = render(run, figures(run))
        else:
            page = render_comparison(runs, comparison_figures(runs))
        arguments.to.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.to, page)
    except OSError as error:
        raise ConfigError(f"{arguments.to} cannot be written: {error}; give another to=FILE") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{', '.join(names)} cannot be drawn, as a file does not hold what lit_rlkv writes: "
            f"{type(error).__name__}: {error}"
        ) from error
    sys.stdout.write(f"{'report' if len(runs) == 1 else 'comparison'}: {arguments.to}\n")


if __name__ == "__main__":
    main()
