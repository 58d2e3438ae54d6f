"""A W&B sweep file, read and checked: method, metric, parameters, early stopping and command."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_rlkv.config import SWEEPS_DIR, ConfigError, require
from lit_rlkv.config.options import Node, convert, option
from lit_rlkv.sweeping.hyperband import Hyperband
from lit_rlkv.sweeping.metric import Metric
from lit_rlkv.sweeping.parameters import Parameter, parse_parameters

Schema = TypeVar("Schema")
MODULE, ARGUMENTS = "lit_rlkv.fit", "${args_no_hyphens}"
COMMAND_HINT = f'command: ["${{env}}", python, -m, {MODULE}, "{ARGUMENTS}"]'
"""A line of YAML; without quotes, a list would take a brace for a mapping."""
HYPHENS = f"W&B's default has hyphens, which fit does not take; write {COMMAND_HINT}"


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """Keys of a sweep file."""

    program: str = option(MISSING, "W&B needs it; write lit_rlkv/fit.py")
    method: Literal["grid", "random", "bayes"] = option(MISSING, "how values are chosen")
    parameters: Node = option(MISSING, "write key: {values: [...]}")
    command: tuple[str, ...] = option(MISSING, HYPHENS)
    metric: Node | None = option(None, "write metric: {name: eval/accuracy, goal: maximize}")
    early_terminate: Node | None = option(None, "write early_terminate: {type: hyperband, min_iter: 3}")
    run_cap: int | None = option(None, "most runs of the whole sweep", least=1)
    name: str | None = option(None, "of the sweep; the file's by default")
    description: str | None = option(None, "for people")
    project: str | None = option(None, "of W&B")
    entity: str | None = option(None, "of W&B")


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file."""

    name: str
    method: str
    metric: Metric
    parameters: tuple[Parameter, ...]
    constants: dict[str, Any]
    hyperband: Hyperband | None
    run_cap: int | None
    command: tuple[str, ...]
    source: dict[str, Any]
    """The file as it was read, for W&B."""

    @property
    def fixed_overrides(self) -> list[str]:
        """Overrides of the command and of the constants, the same in every run."""
        after = self.command[self.command.index(MODULE) + 1 :]
        own = [argument for argument in after if argument != ARGUMENTS]
        return own + [f"{name}={value}" for name, value in self.constants.items()]


def find_sweep(path: Path) -> Path:
    """Return the path, or that of the shipped sweep that it names, as `arms` does, if no such file exists."""
    shipped = SWEEPS_DIR / f"{path.stem}.yaml"
    is_shipped = path in (Path(path.stem), Path(shipped.name), Path("sweeps", shipped.name))
    return shipped if is_shipped and shipped.is_file() and not path.is_file() else path


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file, except for its agreement with the config.

    Raises:
        ConfigError: the first mistake in it.
    """
    source = _load(path)
    file = convert(SweepFile, source)
    for key in source["parameters"]:
        require(
            key not in SweepFile.__dataclass_fields__,
            f"parameters.{key} is no key of a run; it belongs at the top of the file, beside parameters",
        )
    metric = _node(Metric, source, "metric")
    hyperband = _node(Hyperband, source, "early_terminate")
    parameters, constants = parse_parameters(source["parameters"])
    needs = {"method=bayes": file.method == "bayes", "early_terminate": hyperband is not None}
    for which, is_needed in needs.items():
        require(
            metric is not None or not is_needed,
            f"{which} needs a metric, got none; write metric: {{name: ..., goal: maximize}}",
        )
    require(
        len(parameters) > 0, "parameters must vary at least one key, got constants alone; give one values"
    )
    sweep = Sweep(
        name=file.name or path.stem,
        method=file.method,
        metric=metric or Metric(name="eval/accuracy", goal="maximize"),
        parameters=tuple(parameters),
        constants=constants,
        hyperband=hyperband,
        run_cap=file.run_cap,
        command=_checked_command(file.command),
        source=source,
    )
    if file.method == "grid":
        for parameter in parameters:
            parameter.grid()
    return sweep


def n_runs(sweep: Sweep, max_runs: int | None = None) -> int:
    """Return the number of runs: `max_runs`, or else the file's cap, and of a grid at most its cells.

    Raises:
        ConfigError: the sweep would never end.
    """
    bound = max_runs or sweep.run_cap
    if sweep.method == "grid":
        n_cells = math.prod(len(parameter.grid()) for parameter in sweep.parameters)
        return n_cells if bound is None else min(bound, n_cells)
    if bound is None:
        raise ConfigError(
            f"method={sweep.method} never ends by itself; give run_cap in the file, or --max-runs"
        )
    return bound


def _load(path: Path) -> dict[str, Any]:
    """Return the content of a file; unlike PyYAML, OmegaConf refuses a key that stands twice."""
    names = ", ".join(sorted(shipped.stem for shipped in SWEEPS_DIR.glob("*.yaml")))
    require(path.is_file(), f"there is no sweep file at {str(path)!r}; give a path, or one of {names}")
    try:
        node = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(node, DictConfig) or not node:
        raise ConfigError(f"{path} must hold keys with values: {', '.join(SweepFile.__dataclass_fields__)}")
    return cast(dict[str, Any], OmegaConf.to_container(node))


def _node(schema: type[Schema], source: Mapping[str, Any], name: str) -> Schema | None:
    return None if source.get(name) is None else convert(schema, source[name], name)


def _checked_command(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command, which must hand the parameters to fit as overrides."""
    is_fit = MODULE in words and words[words.index(MODULE) - 1] == "-m"
    macros = [word for word in words if word.startswith("${args")]
    if not is_fit or macros != [ARGUMENTS] or words.index(ARGUMENTS) < words.index(MODULE):
        raise ConfigError(f"command must run fit with overrides, got {list(words)}; write {COMMAND_HINT}")
    return words
