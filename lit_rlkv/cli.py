"""Functions of all command lines: their course, their config, and errors in one line."""

import errno
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from os.path import abspath, isdir
from typing import TypeVar

import hydra
from omegaconf import DictConfig, open_dict, read_write

from lit_rlkv.checks import OneLineError
from lit_rlkv.config import CONF_DIR, ConfigError, composed, grant_trust
from lit_rlkv.config.composing import SEARCH_PATH, SEVERAL, quoted
from lit_rlkv.config.keys import NAMED, OPTIONS
from lit_rlkv.interrupts import abort_on_ctrl_c, is_first_process, unwind_on_ctrl_c
from lit_rlkv.units import shortened

MAX_SHOWN = 60
"""Characters of a name that is too long."""
MAX_ERROR, END_OF_ERROR = 3000, 500
"""Characters of an error that are shown, and how many of these are its end."""
PRINTING_OPTIONS = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "-sc"}
"""Options of Hydra that print and run nothing; the last is for the completion of shells."""

Asked = TypeVar("Asked")


def run_command(
    parse: Callable[[list[str]], Asked],
    modules: Sequence[str],
    work: Callable[[Asked], None],
    *,
    libraries: str = "torch and transformers",
    interrupted: str = "interrupted",
) -> None:
    """Run a command line; an error whose message says all, and Ctrl-C, end it in one line.

    Args:
        parse: returns what the arguments ask for; it comes before torch is loaded.
        modules: modules that take seconds to import, of the work.
        work: does what was asked for.
        libraries: what the modules load, for the line that says so.
        interrupted: what Ctrl-C says during the work.
    """
    with abort_on_ctrl_c("interrupted before any work; nothing has changed"), exit_in_one_line():
        asked = parse(sys.argv[1:])
        if is_first_process():
            sys.stderr.write(f"loading {libraries}\n")
            sys.stderr.flush()
        # Here, where Ctrl-C ends the process: an exception in the middle of an import may be caught there.
        for module in modules:
            import_module(module)
    with unwind_on_ctrl_c(interrupted), exit_in_one_line():
        try:
            work(asked)
        except SystemExit as error:
            if error.code in (None, 0) and is_first_process():
                raise ConfigError("code that the run calls ended it by sys.exit(); let it return") from error
            raise


def compose_arguments(name: str, arguments: Sequence[str]) -> tuple[DictConfig, DictConfig]:
    """Return the composed config and Hydra's own node; options of Hydra such as --help print and exit.

    `trusted_modules` takes effect here and is not in the config, so that no run folder saves it.

    Args:
        name: name of the config in conf/.

    Raises:
        ConfigError: the arguments do not compose, or trust a module that cannot be trusted.
    """
    if {argument.partition("=")[0] for argument in arguments} & PRINTING_OPTIONS:
        free = tuple(place.rstrip(".") for place in (OPTIONS, *NAMED))
        sys.argv[1:] = [f"++{one}" if one.startswith(free) else one for one in arguments]
        hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)(lambda _: None)()
        sys.exit()
    example = "seed=3" if name == "config" else "ckpt=runs/NAME"
    config_dir, overrides = split_config_dir(arguments)
    for argument in overrides:
        if argument in ("-m", "--multirun"):
            raise ConfigError(f"{argument}: {SEVERAL}")
        if argument.startswith("-") or ("=" not in argument and not argument.startswith("~")):
            raise ConfigError(
                f"{argument!r} sets nothing; write key=value, such as {example}; --help shows more"
            )
    if config_dir is not None:
        overrides.append(f"{SEARCH_PATH}=[{quoted(f'file://{abspath(config_dir)}')}]")
    cfg = composed(name, overrides)
    hydra_cfg = cfg.hydra
    with read_write(cfg), open_dict(cfg):
        del cfg["hydra"]
    grant_trust(cfg, hydra_cfg.overrides.task)
    return cfg, hydra_cfg


def split_config_dir(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the folder of Hydra's option --config-dir, which must be one, and the other arguments."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", nargs="?", const="", dest="folder")
    found, others = parser.parse_known_args(arguments)
    if found.folder is not None and not isdir(found.folder):
        raise ConfigError(f"--config-dir={found.folder} is no folder; give one that has GROUP/NAME.yaml")
    return found.folder, others


@contextmanager
def exit_in_one_line() -> Iterator[None]:
    """End the process with `error: ...` and exit code 1 on a OneLineError, and on names too long."""
    try:
        yield
    except OneLineError as error:
        sys.exit(f"error: {shortened(str(error), MAX_ERROR, END_OF_ERROR)}")
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        sys.exit(
            f"error: the name {str(error.filename)[:MAX_SHOWN]}... is too long for a file; give a shorter one"
        )
