"""Functions of all command lines: compose the config, and print errors in one line."""

import errno
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

import hydra
from omegaconf import DictConfig, open_dict, read_write

from lit_rlkv.config import CONF_DIR, ConfigError, check_command_line, grant_trust
from lit_rlkv.config.help import asked_help
from lit_rlkv.interrupts import is_first_process
from lit_rlkv.units import shortened

MAX_SHOWN = 60
"""Characters of a name that is too long."""
MAX_ERROR, END_OF_ERROR = 3000, 500
"""Characters of an error that are shown, and how many of these are its end."""
PRINTING_OPTIONS = {"--cfg", "-c", "--info", "-i", "--hydra-help"}
"""Options of Hydra that print and run nothing."""


def compose_arguments(name: str, arguments: Sequence[str]) -> tuple[DictConfig, DictConfig]:
    """Return the composed config and Hydra's own node; --help, --help-all and --cfg print and exit.

    `trusted_modules` takes effect here and is not in the config, so that no run folder saves it.

    Args:
        name: name of the config in conf/.

    Raises:
        ConfigError: the arguments do not compose, or trust a module that cannot be trusted.
    """
    if (text := asked_help(name, arguments)) is not None:
        sys.stdout.write(f"{text}\n")
        sys.exit()
    composed = check_command_line(name, arguments)
    if composed is None or {argument.partition("=")[0] for argument in arguments} & PRINTING_OPTIONS:
        hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)(_refuse)()
        sys.exit()
    hydra_cfg = composed.hydra
    with read_write(composed), open_dict(composed):
        del composed["hydra"]
    grant_trust(composed, hydra_cfg.overrides.task)
    return composed, hydra_cfg


def _refuse(cfg: DictConfig) -> None:
    raise ConfigError(f"{' '.join(sys.argv[1:])}: only --help, --info and --cfg are options; see --help")


def import_slow_modules(*modules: str) -> None:
    """Import modules that take seconds, after a line that says so; of several processes, the first prints it.

    Call it inside `abort_on_ctrl_c`, and before any other handler of Ctrl-C: an exception in the middle of an
    import may be caught there, or show a traceback.
    """
    if is_first_process():
        sys.stderr.write("loading torch and transformers\n")
        sys.stderr.flush()
    for module in modules:
        import_module(module)


@contextmanager
def exit_in_one_line(*kinds: type[BaseException]) -> Iterator[None]:
    """End the process with `error: ...` and exit code 1 on errors of these kinds, and on names too long."""
    try:
        yield
    except kinds as error:
        sys.exit(f"error: {shortened(str(error), MAX_ERROR, END_OF_ERROR)}")
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        sys.exit(
            f"error: the name {str(error.filename)[:MAX_SHOWN]}... is too long for a file; give a shorter one"
        )
