"""What each run of a sweep is told, and the config that makes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lit_rlkv.config import CONF_DIR, ConfigError
from lit_rlkv.sweeping.parameters import Drawn
from lit_rlkv.sweeping.spec import Sweep

DEFAULTS = ("logger=csv", "fabric.n_threads=1")
"""Of runs side by side on one machine, unless the user says otherwise; `logger=wandb` is for W&B's agents."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    number: int
    values: dict[str, Any]
    """Of the parameters that the sweep varies."""
    folder: Path


@dataclass(frozen=True)
class Composed:
    """The config of a run, and how it came about."""

    cfg: DictConfig
    choices: dict[str, str | None]
    """The option chosen in each group."""
    overrides: list[str]


@dataclass(frozen=True)
class Plan:
    """A sweep file and the overrides that all of its runs get beside it."""

    sweep: Sweep
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        varied = {parameter.name for parameter in self.sweep.parameters}
        for override in self.overrides:
            name, has_value, _ = key_of(override), *override.partition("=")[1:]
            if not has_value and not override.startswith("~"):
                raise ConfigError(f"{override!r} is no override; give key=value")
            if name in varied:
                raise ConfigError(
                    f"{override}: the sweep itself varies {name}; leave it out, or edit the file"
                )
            if name in ("resume", "hydra.run.dir"):
                raise ConfigError(f"{override}: a sweep gives every run a folder of its own; use --dir")

    def arguments(self, values: dict[str, Any], folder: Path) -> list[str]:
        """The command line of a run; what comes later wins, so the user's overrides do."""
        given = {key_of(override) for override in self.overrides}
        defaults = [override for override in DEFAULTS if key_of(override) not in given]
        swept = [f"{name}={value}" for name, value in values.items()]
        return [*self.sweep.fixed_overrides, *defaults, *swept, *self.overrides, folder_override(folder)]

    def values(self, drawn: dict[str, Drawn]) -> dict[str, Any]:
        """What a draw of each parameter stands for."""
        return {parameter.name: parameter.value(drawn[parameter.name]) for parameter in self.sweep.parameters}

    def compose(self, values: dict[str, Any], folder: Path) -> Composed:
        """The config of a run, as its own process will compose it.

        Raises:
            ConfigError: it does not compose.
        """
        overrides = self.arguments(values, folder)
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            try:
                cfg = compose("config", overrides=overrides, return_hydra_config=True)
            except (HydraException, OmegaConfBaseException) as error:
                raise ConfigError(_said_better(error)) from error
        HydraConfig.instance().set_config(cfg)  # for ${hydra:run.dir}
        choices, added = cfg.hydra.runtime.choices, cfg.hydra.overrides.task
        with open_dict(cfg):
            del cfg["hydra"]
        return Composed(cfg, dict(choices), list(added))


def _said_better(error: Exception) -> str:
    """Hydra's error in one line; of a key that does not exist, with one that does."""
    unknown = re.match(r"Could not override '([\w.]+)'", str(error))
    if unknown is None:
        return " ".join(str(error).split())
    known = _keys(OmegaConf.to_container(compose("config")))
    close = get_close_matches(unknown[1], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "python -m lit_rlkv.fit --cfg job shows all"
    return f"unknown key {unknown[1]!r}: {hint}"


def _keys(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, Mapping):
        return [prefix.rstrip(".")]
    return [key for name, value in node.items() for key in _keys(value, f"{prefix}{name}.")]


def key_of(override: str) -> str:
    """The key that an override of the command line sets, adds or removes."""
    return override.lstrip("+~").split("=")[0]


def folder_override(folder: Path) -> str:
    """Tells fit where its folder is; in quotes, as a path may hold what Hydra's grammar would split at."""
    return f"hydra.run.dir={quoted(folder)}"


def quoted(path: Path) -> str:
    escaped = str(path).replace("'", "\\'")
    return f"'{escaped}'"
