"""What each run of a sweep is told, and the config that makes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from lit_rlkv.config import CONF_DIR, ConfigError, composed, grant_trust, quoted
from lit_rlkv.config.targets import user_code
from lit_rlkv.sweeping.parameters import Drawn, listed
from lit_rlkv.sweeping.spec import Sweep
from lit_rlkv.trust import KEY, trusted_modules

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
        self._check_presets()

    def _check_presets(self) -> None:
        """A group of the command line beats that of a preset: every arm would silently become the same."""
        swept = [parameter for parameter in self.sweep.parameters if parameter.name == "experiment"]
        if not swept:
            return
        for override in (*self.sweep.fixed_overrides, *self.overrides):
            group = key_of(override)
            setting = [arm for arm in listed(swept[0]) if group in groups_of(arm)]
            if setting:
                raise ConfigError(
                    f"{override}: the sweep varies experiment, and {', '.join(setting)} would lose the "
                    f"{group} of its own; leave it out, or vary the groups that differ in place of "
                    "experiment, as sweeps/arms_anchored.yaml does"
                )

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
        cfg = composed("config", overrides)
        HydraConfig.instance().set_config(cfg)  # for ${hydra:run.dir}
        choices, added = cfg.hydra.runtime.choices, cfg.hydra.overrides.task
        with open_dict(cfg):
            del cfg["hydra"]
        grant_trust(cfg, added)
        return Composed(cfg, dict(choices), list(added))

    def trust(self, values: dict[str, Any], folder: Path) -> list[str]:
        """Return the override that trusts the user's own code when a run of this sweep is resumed."""
        functions = self.compose(values, folder).cfg.reward.functions
        names = [quoted(name) for name in (*trusted_modules(), *user_code(functions).values())]
        return [f"{KEY}=[{','.join(names)}]"] if names else []


def groups_of(experiment: str) -> set[str]:
    """The groups that an experiment preset chooses an option of; none of a preset that does not exist."""
    path = CONF_DIR / "experiment" / f"{experiment}.yaml"
    defaults = (yaml.safe_load(path.read_text()) or {}).get("defaults", []) if path.is_file() else []
    keys = [key for entry in defaults if isinstance(entry, dict) for key in entry]
    return {key.removeprefix("override").strip().lstrip("/") for key in keys}


def by_key(overrides: Sequence[str]) -> list[str]:
    """Overrides in an order that does not tell how they were typed; of one key, the last still wins."""
    return sorted(overrides, key=key_of)


def key_of(override: str) -> str:
    """The key that an override of the command line sets, adds or removes."""
    return override.lstrip("+~").split("=")[0]


def folder_override(folder: Path) -> str:
    """Tells fit where its folder is; in quotes, as a path may hold what Hydra's grammar would split at."""
    return f"hydra.run.dir={quoted(str(folder))}"
