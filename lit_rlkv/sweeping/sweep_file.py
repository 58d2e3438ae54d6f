"""A W&B sweep file: what it varies, and the command line of each of its runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from lit_rlkv.config import CONF_DIR, SWEEPS_DIR, ConfigError, quoted, require
from lit_rlkv.config.options import Node, convert, leaves
from lit_rlkv.files import check_yaml, read_text
from lit_rlkv.settings import PositiveInt, Text
from lit_rlkv.settings import dataclass as settings
from lit_rlkv.trust import KEY

COMMAND = ("${env}", "python", "-m", "lit_rlkv.fit", "${args_no_hyphens}")
DEFAULTS = ("logger=csv", "fabric.n_threads=1")
"""Of runs side by side without an account; the file's logger is for W&B."""
ELSEWHERE = "`wandb sweep FILE` and `wandb agent` run it"

DISTRIBUTIONS: dict[str, Callable[..., BaseDistribution]] = {
    "int_uniform": IntDistribution,
    "uniform": FloatDistribution,
    "q_uniform": FloatDistribution,
    "log_uniform_values": partial(FloatDistribution, log=True),
}
"""Distributions of numbers, by W&B's names."""
OPTUNA_NAMES = {"min": "low", "max": "high", "q": "step"}

Values = dict[str, str]
"""What a run gives to each key that the sweep varies, as text for its command line."""


@settings(frozen=True, kw_only=True)
class Metric:
    """The metric that compares runs."""

    name: Text = "eval/accuracy"
    """a column of metrics.csv, or of the final evaluation"""
    goal: Literal["minimize", "maximize"] = "maximize"
    """which values are better"""


@settings(frozen=True, kw_only=True)
class SweepFile:
    """Keys of a sweep file."""

    program: Text
    """W&B needs it; write lit_rlkv/fit.py"""
    method: Literal["grid", "random", "bayes"]
    """how values are chosen"""
    parameters: Node
    """write key: {values: [...]}"""
    command: tuple[Text, ...]
    """write ["${env}", python, -m, lit_rlkv.fit, "${args_no_hyphens}"]; W&B's default has hyphens"""
    metric: Node | None = None
    """write metric: {name: eval/accuracy, goal: maximize}"""
    run_cap: PositiveInt | None = None
    """most runs of the whole sweep"""
    name: Text | None = None
    """of the sweep"""
    description: Text | None = None
    """for people"""
    project: Text | None = None
    """of W&B"""
    entity: Text | None = None
    """of W&B"""


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file, with the user's overrides for all of its runs."""

    method: str
    metric: Metric
    run_cap: int | None
    constants: Values
    space: dict[str, BaseDistribution]
    """What is varied."""
    overrides: tuple[str, ...] = ()

    @cached_property
    def cells(self) -> list[Values]:
        """All combinations of listed values, the first key varying slowest; none without listed values."""
        listed = {key: each.choices for key, each in self.space.items() if hasattr(each, "choices")}
        return [dict(zip(listed, cell, strict=True)) for cell in product(*listed.values())]

    def n_runs(self, asked: int | None = None) -> int:
        """Return the number of runs: as asked, or else the file's cap; of a grid at most all cells.

        Raises:
            ConfigError: the sweep would never end.
        """
        cap = asked or self.run_cap
        if self.method == "grid":
            return min(cap or len(self.cells), len(self.cells))
        if cap is None:
            raise ConfigError(
                f"method={self.method} never ends by itself; give run_cap in the file, or --max-runs"
            )
        return cap

    @property
    def fixed(self) -> list[str]:
        """Overrides that all runs have; later ones win, so the user's do."""
        given = [one for one in self.overrides if one.startswith("debug=")]
        files = [CONF_DIR / f"{one.replace('=', '/')}.yaml" for one in given]
        # In Hydra a key always wins over an option of a group; here the user's option does.
        taken = {key for file in files if file.is_file() for key, _ in leaves(OmegaConf.load(file))}
        constants = [
            f"{key}={value}"
            for key, value in self.constants.items()
            if key not in taken and key.partition(".")[0] != "logger"
        ]
        return [*DEFAULTS, *constants, *self.overrides]

    def arguments(self, values: Values, folder: Path) -> list[str]:
        """Return the arguments of fit for a run, which resumes what is in its folder."""
        varied = [f"{key}={value}" for key, value in values.items()]
        return [*varied, *self.fixed, f"hydra.run.dir={quoted(str(folder))}", "resume=auto"]


def find_sweep(path: Path) -> Path:
    """Return the path, or that of the shipped sweep that it names, as `arms` does, if no such file exists."""
    shipped = SWEEPS_DIR / f"{path.stem}.yaml"
    return path if path.is_file() or not shipped.is_file() else shipped


def read_sweep(path: Path, overrides: tuple[str, ...] = ()) -> Sweep:
    """Read and check a sweep file and overrides, but for their agreement with the config.

    Raises:
        ConfigError: the first mistake.
    """
    source = _load(path)
    require(
        "early_terminate" not in source,
        f"early_terminate works on W&B alone: {ELSEWHERE}; leave it out to run the file here",
    )
    file = convert(SweepFile, source)
    require(
        file.command == COMMAND,
        f"command must be {list(COMMAND)}, got {list(file.command)}; constants go to parameters",
    )
    constants, space = {}, {}
    for key, options in source["parameters"].items():
        found = _parsed(key, options)
        if isinstance(found, BaseDistribution):
            space[key] = found
        else:
            constants[key] = found
    require(bool(space), "parameters must vary at least one key; give one values")
    for key in (*constants, *space):
        require(key not in (KEY, "resume", "hydra.run.dir"), f"parameters.{key} is not for a file to set")
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        require(key not in space, f"{override}: the sweep varies {key}; leave it out, or edit the file")
        require(key not in ("resume", "hydra.run.dir"), f"{override}: give the sweep a folder by --dir")
    numeric = [key for key, each in space.items() if not isinstance(each, CategoricalDistribution)]
    require(file.method != "grid" or not numeric, f"a grid needs values: [...] of {', '.join(numeric)}")
    metric = convert(Metric, source.get("metric") or {}, "metric")
    return Sweep(file.method, metric, file.run_cap, constants, space, overrides)


def _load(path: Path) -> dict[str, Any]:
    names = ", ".join(sorted(shipped.stem for shipped in SWEEPS_DIR.glob("*.yaml")))
    require(path.is_file(), f"there is no sweep file at {str(path)!r}; give a path, or one of {names}")
    try:
        text = read_text(path)
        check_yaml(text)
        source: Any = OmegaConf.to_container(OmegaConf.create(text))
    except (yaml.YAMLError, ValueError, OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(source, dict) or not isinstance(source.get("parameters"), dict):
        raise ConfigError(f"{path} has no parameters")
    return source


def _parsed(key: str, options: Any) -> str | BaseDistribution:
    """Return the text of a constant, or what to draw a varied key from."""
    where = f"parameters.{key}"
    require(isinstance(options, Mapping), f"{where} must be a mapping, such as {{values: [...]}}")
    given = dict(options)
    kind = given.pop("distribution", None)
    if given.keys() == {"value"} and kind in (None, "constant"):
        return _text(given["value"])
    if given.keys() == {"values"} and kind in (None, "categorical"):
        require(isinstance(given["values"], list) and bool(given["values"]), f"{where}.values must be a list")
        return CategoricalDistribution(tuple(dict.fromkeys(map(_text, given["values"]))))
    is_whole = all(isinstance(given.get(end), int) for end in ("min", "max"))
    arguments = {OPTUNA_NAMES.get(str(name), str(name)): value for name, value in given.items()}
    try:
        return DISTRIBUTIONS[kind or ("int_uniform" if is_whole else "uniform")](**arguments)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: {dict(options)} cannot be drawn here ({error}); write value, values, or min and max "
            f"with distribution {', '.join(DISTRIBUTIONS)}, or let {ELSEWHERE}"
        ) from error


def _text(value: Any) -> str:
    return "null" if value is None else str(value)
