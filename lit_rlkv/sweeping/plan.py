"""The runs of a sweep: their command lines and configs, and all checks before the first one starts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from lit_rlkv.config import (
    CONF_DIR,
    Config,
    ConfigError,
    check_keys,
    composed,
    grant_trust,
    parse_config,
    quoted,
    require,
)
from lit_rlkv.config.targets import user_code
from lit_rlkv.reporting.progress import track
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.sweeping.metric import check_metric
from lit_rlkv.sweeping.parameters import Drawn, combinations
from lit_rlkv.sweeping.sweep_file import Sweep
from lit_rlkv.trust import KEY, trusted_modules

DEFAULTS = ("logger=csv", "fabric.n_threads=1")
"""Defaults of runs side by side on one machine; the logger replaces that of the file, which is for W&B."""
DEFAULTS_ON_WANDB = ("logger=wandb", "fabric.n_threads=1")
"""Those of W&B's agents, which keep the logger of the file."""
N_QUIET = 20
"""Combinations up to which a check shows no progress bar."""


@dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    number: int
    values: dict[str, Any]
    """Values of the parameters that the sweep varies."""
    folder: Path


@dataclass(frozen=True)
class Composed:
    """The config of a run, the option chosen in each group, and the overrides."""

    cfg: DictConfig
    choices: dict[str, str | None]
    overrides: list[str]


@dataclass(frozen=True)
class Plan:
    """A sweep file, and the user's overrides for all of its runs."""

    sweep: Sweep
    overrides: tuple[str, ...] = ()
    on_wandb: bool = False
    """True if agents of W&B start the runs."""

    def __post_init__(self) -> None:
        varied = {parameter.name for parameter in self.sweep.parameters}
        for override in self.overrides:
            name = key_of(override)
            require(
                "=" in override or override.startswith("~"),
                f"an override must be key=value, got {override!r}",
            )
            require(
                name not in varied,
                f"{override}: the sweep itself varies {name}; leave it out, or edit the file",
            )
            require(
                name not in ("resume", "hydra.run.dir"),
                f"{override}: a sweep gives every run a folder of its own; use --dir",
            )
        self._check_presets()

    def _check_presets(self) -> None:
        """Refuse to override a group that the swept presets choose, which would make all arms the same."""
        arms = next((each.listed() for each in self.sweep.parameters if each.name == "experiment"), [])
        for override in (*self.sweep.fixed_overrides, *self.overrides):
            group = key_of(override)
            if setting := [arm for arm in arms if group in groups_of(arm)]:
                raise ConfigError(
                    f"{override}: the sweep varies experiment, and {', '.join(setting)} would lose the "
                    f"{group} of its own; leave it out, or vary the groups that differ in place of "
                    "experiment, as sweeps/arms_anchored.yaml does"
                )

    def arguments(self, values: dict[str, Any], folder: Path) -> list[str]:
        """Return the command line of a run; later overrides win, so the user's do."""
        defaults, fixed = self.defaults(), self.sweep.fixed_overrides
        if DEFAULTS[0] in defaults:  # the options of a logger that is replaced are unknown to the other
            fixed = [override for override in fixed if not key_of(override).startswith("logger.")]
        swept = [f"{name}={value}" for name, value in values.items()]
        return [*fixed, *defaults, *swept, *self.overrides, folder_override(folder)]

    def defaults(self) -> list[str]:
        """Return the defaults that neither the file nor the user sets."""
        given = {key_of(override) for override in self.sweep.fixed_overrides}
        given -= set() if self.on_wandb else {"logger"}
        given |= {parameter.name for parameter in self.sweep.parameters}
        given |= {key_of(override) for override in self.overrides}
        defaults = DEFAULTS_ON_WANDB if self.on_wandb else DEFAULTS
        return [override for override in defaults if key_of(override) not in given]

    def values(self, drawn: dict[str, Drawn]) -> dict[str, Any]:
        """Return the value of each parameter for a draw."""
        return {parameter.name: parameter.value(drawn[parameter.name]) for parameter in self.sweep.parameters}

    def combinations(self) -> list[dict[str, Any]]:
        """Return the values of all runs of a grid, or of the corners of a search space."""
        return [self.values(drawn) for drawn in combinations(self.sweep.parameters, self.sweep.method)]

    def compose(self, values: dict[str, Any], folder: Path) -> Composed:
        """Return the config of a run, as its own process will compose it.

        Raises:
            ConfigError: it does not compose.
        """
        cfg = composed("config", self.arguments(values, folder))
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


def first_config(plan: Plan) -> Config:
    """Return the config of the first combination, with no check of its objects.

    Raises:
        ConfigError: it does not compose.
    """
    values = plan.combinations()[0]
    with _naming_the_run(values):
        return parse_config(plan.compose(values, Path("unused")).cfg)


def check_plan(plan: Plan) -> None:
    """Compose and check every combination of a grid, or the corners of a search space.

    Raises:
        ConfigError: a combination does not work.
    """
    cells = cells_to_check(plan)
    known: set[str] = set()
    with track("check", len(cells)) if len(cells) > N_QUIET else nullcontext(int) as advance:
        for values in cells:
            with _naming_the_run(values):
                _check_run(plan, values, known)
            advance()


def cells_to_check(plan: Plan) -> list[dict[str, Any]]:
    """Return all combinations with the first seed, and the first combination with each seed."""
    cells = plan.combinations()
    first = cells[0]
    others = {name: value for name, value in first.items() if name != "seed"}
    return [
        cell
        for cell in cells
        if cell.get("seed") == first.get("seed") or all(cell[name] == value for name, value in others.items())
    ]


def _check_run(plan: Plan, values: dict[str, Any], known: set[str]) -> None:
    """Check a run against every rule, and its keys unless its choice of groups is `known`."""
    run = plan.compose(values, Path("unused"))
    groups = repr(run.choices)
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        if groups not in known:
            check_keys(run.cfg, run.choices, run.overrides)
    known.add(groups)
    is_watched = plan.sweep.hyperband is not None
    check_metric(plan.sweep.metric, checked_config(run.cfg), is_watched=is_watched)


@contextmanager
def _naming_the_run(values: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        named = " ".join(f"{name}={value}" for name, value in values.items())
        raise ConfigError(f"{error} (in the run with {named})") from error


def groups_of(experiment: str) -> set[str]:
    """Return the groups that an experiment preset sets; none of a preset that does not exist."""
    path = CONF_DIR / "experiment" / f"{experiment}.yaml"
    defaults = (yaml.safe_load(path.read_text()) or {}).get("defaults", []) if path.is_file() else []
    keys = [key for entry in defaults if isinstance(entry, dict) for key in entry]
    return {key.removeprefix("override").strip().lstrip("/") for key in keys}


def by_key(overrides: Sequence[str]) -> list[str]:
    """Return overrides sorted by key, in a stable order: of one key, the last wins."""
    return sorted(overrides, key=key_of)


def key_of(override: str) -> str:
    """Return the key that an override of the command line sets, adds or removes."""
    return override.lstrip("+~").split("=")[0]


def folder_override(folder: Path) -> str:
    """Return the override of a run's folder, quoted because a path may hold characters of Hydra's grammar."""
    return f"hydra.run.dir={quoted(str(folder))}"
