"""lit-rlkv COMMAND: every command line under one name; `lit-rlkv fit ...` is `python -m lit_rlkv.fit ...`."""

import runpy
import sys
from difflib import get_close_matches

from lit_rlkv import __version__
from lit_rlkv.interrupts import abort_on_ctrl_c

COMMANDS = {
    "plan": "say what fits a card and how long it takes, before any work",
    "fit": "train a policy: SFT, RL, evaluation, report",
    "evaluate": "score a saved run for each cache policy and budget",
    "export": "write a saved policy for transformers and peft",
    "audit": "say how far another engine's log is from the learner, and why",
    "report": "draw a run's report again, or compare runs",
    "sweep": "run a sweep file: many runs, one table",
}
"""Modules of the command lines, each with its meaning."""


def main() -> None:
    """Run the command that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h"):
        sys.stdout.write(help_page())
    elif name == "--version":
        sys.stdout.write(f"lit_rlkv {__version__}\n")
    elif name in COMMANDS:
        del sys.argv[1]
        # As `python -m` does it: processes that the run starts take module and arguments from __main__.
        with abort_on_ctrl_c("interrupted"):  # until the module's own line takes over
            runpy.run_module(f"lit_rlkv.{name}", run_name="__main__", alter_sys=True)
    else:
        sys.exit(f"error: {unknown(name, sys.argv[1:])}")


def help_page() -> str:
    """Return the text of `lit-rlkv --help`."""
    lines = [f"  {name:<12}{meaning}" for name, meaning in COMMANDS.items()]
    return (
        "lit-rlkv: RL post-training of language models under a KV cache of fixed size\n\n"
        "  lit-rlkv COMMAND ...      the same as python -m lit_rlkv.COMMAND ...\n\n"
        + "\n".join(lines)
        + "\n\nlit-rlkv COMMAND --help shows the arguments of a command; lit-rlkv --version the version.\n"
    )


def unknown(name: str, arguments: list[str]) -> str:
    """Return the error for a word that is no command, with the closest command."""
    if "=" in name:
        return f"{name!r} must come after a command; write lit-rlkv fit {' '.join(arguments)}"
    close = get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(COMMANDS)}"
    return f"unknown command {name!r}: {hint}"


if __name__ == "__main__":
    main()
