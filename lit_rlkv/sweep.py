"""python -m lit_rlkv.sweep FILE: run a W&B sweep file on this machine, or hand it to W&B."""

import shlex
import sys

from lit_rlkv.cli import exit_in_one_line, import_slow_modules
from lit_rlkv.config import ConfigError
from lit_rlkv.interrupts import abort_on_ctrl_c, unwind_on_ctrl_c
from lit_rlkv.sweeping.arguments import parse


def main() -> None:
    """Run the command line; Ctrl-C stops all runs, which the same command resumes."""
    command = shlex.join(["python", "-m", "lit_rlkv.sweep", *sys.argv[1:]])
    with abort_on_ctrl_c(f"interrupted before the sweep began; start it with {command}"):
        args = parse(sys.argv[1:])
        import_slow_modules("lit_rlkv.sweeping.command")
        from lit_rlkv.sweeping.command import sweep

        with unwind_on_ctrl_c(f"interrupted; resume with {command}"), exit_in_one_line(ConfigError):
            sweep(args)


if __name__ == "__main__":
    main()
