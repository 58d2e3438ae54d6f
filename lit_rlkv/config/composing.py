"""Compose a config by Hydra; its errors become one line."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from os.path import expanduser
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from lit_rlkv.config.commands import EvaluateConfig, ExportConfig
from lit_rlkv.config.errors import ConfigError, interpolations_as_config_errors
from lit_rlkv.config.options import default_values
from lit_rlkv.config.schema import Config

PACKAGE_DIR = Path(__file__).parent.parent
SHIPPED_IN = PACKAGE_DIR if (PACKAGE_DIR / "conf").is_dir() else PACKAGE_DIR.parent
"""The package itself in a wheel, or the clone in an editable install."""
CONF_DIR, SWEEPS_DIR = SHIPPED_IN / "conf", SHIPPED_IN / "sweeps"

SCHEMAS: dict[str, type] = {"config": Config, "evaluate": EvaluateConfig, "export": ExportConfig}
"""Schema of each program's config, by the config's name in conf/."""
for _name, _schema in SCHEMAS.items():
    ConfigStore.instance().store(f"{_name}_defaults", default_values(_schema))
INSTEAD_OF_OPTIONS = {
    "model": "; a checkpoint folder or hub name is model.path={}",
    "task": "; data of your own are task=dataset task.dataset={}",
}
"""How to write what is given in place of an option, by the group."""
SEARCH_PATH = "hydra.searchpath"
SEVERAL = "several runs are a sweep; write a file such as sweeps/arms.yaml, and python -m lit_rlkv.sweep FILE"


def initialized() -> AbstractContextManager[Any]:
    """Initialise Hydra with CONF_DIR, unless the caller has initialised it."""
    if GlobalHydra.instance().is_initialized():
        return nullcontext()
    return initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR))


def composed(name: str, overrides: Sequence[str]) -> DictConfig:
    """Return the config that a program with these overrides composes, with Hydra's own node in it.

    Keys that do not exist are in it: `check_keys` refuses them for fit, and `parse` for the other programs.

    Raises:
        ConfigError: it does not compose.
    """
    with initialized():
        try:
            cfg = compose(name, [_forced(each) for each in overrides], return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(_in_one_line(error, overrides)) from error
    with read_write(cfg.hydra):
        cfg.hydra.overrides.task = list(overrides)
    # The key that a value refers to may be one that is taken away, which check_keys answers.
    if not any(override.startswith("~") for override in overrides):
        with interpolations_as_config_errors():
            OmegaConf.to_container(
                OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]), resolve=True
            )
    return cfg


def _forced(override: str) -> str:
    """Return an override that adds a key where there is none, so that one place refuses unknown keys."""
    key = override.partition("=")[0]
    is_choice = "/" in key or "@" in key or bool(options_of(key))
    return override if is_choice or key == SEARCH_PATH or key[:1] in ("+", "~") else f"++{override}"


def _in_one_line(error: Exception, overrides: Sequence[str]) -> str:
    """Return Hydra's error in one line, with the options of a group, or a value quoted. Needs Hydra."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        options = options_of(key)
        if options and value not in options:
            close = get_close_matches(value.lower(), options, 1)
            hint = f"; did you mean {key}={close[0]}?" if close else INSTEAD_OF_OPTIONS.get(key, "")
            hint = f"; {SEVERAL}" if "," in value else hint
            return f"{key} must be one of {', '.join(options)}, got {value}{hint.format(value)}"
        quote = f'quote it: "{key}={quoted(expanduser(value))}"'
        try:
            is_sweep = OverridesParser.create().parse_override(override).is_sweep_override()
        except HydraException:
            return f"{override}: the value cannot be read as it stands; {quote}"
        if is_sweep:
            return f"{override}: if it is one value, {quote}; a list is {key}=[{value}]; {SEVERAL}"
        if str(error).startswith("Error merging override") and str(error).endswith(override):
            return f"{key} has keys of its own, got {value}; give {key}.NAME=..."
    return " ".join(str(error).split())


def quoted(value: str) -> str:
    """Return a text quoted for Hydra's grammar."""
    escaped = value.replace("'", "\\'")
    return f"'{escaped}'"


def groups() -> list[str]:
    """Return the names of the config groups, which have options."""
    return sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir())


def options_of(group: str) -> list[str]:
    """Return the options of a config group; none if there is no such group."""
    if not group.isidentifier():
        return []
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))
