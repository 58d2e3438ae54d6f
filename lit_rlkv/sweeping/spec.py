"""A W&B sweep file, read and checked: method, metric, parameters, early stopping and command."""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lit_rlkv.checks import is_count
from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.distributions import parse_parameters
from lit_rlkv.sweeping.hyperband import Hyperband, parse_hyperband
from lit_rlkv.sweeping.metric import Metric, parse_metric
from lit_rlkv.sweeping.parameters import Parameter

METHODS = ("grid", "random", "bayes")
MODULE, ARGUMENTS = "lit_rlkv.fit", "${args_no_hyphens}"
COMMAND = ("${env}", "python", "-m", MODULE, ARGUMENTS)
"""The `command` of a sweep file, which may also hold overrides of its own after the module."""
COMMAND_HINT = f'command: ["${{env}}", python, -m, {MODULE}, "{ARGUMENTS}"]'
"""As a line of YAML, whose lists take a brace for a mapping unless it is quoted."""
NEEDED = {
    "program": "W&B asks for it, give lit_rlkv/fit.py",
    "method": f"choose one of {', '.join(METHODS)}",
    "parameters": "give key: {values: [...]}",
    "command": f"W&B's own has hyphens, which fit does not take; give {COMMAND_HINT}",
}
KEYS = (*NEEDED, "name", "description", "project", "entity", "metric", "early_terminate", "run_cap")


@dataclass(frozen=True)
class Sweep:
    """What a sweep file asks for."""

    name: str
    method: str
    metric: Metric
    parameters: tuple[Parameter, ...]
    constants: dict[str, Any]
    hyperband: Hyperband | None
    run_cap: int | None
    """Most runs of the whole sweep; None does not bound them."""
    command: tuple[str, ...]
    source: dict[str, Any]
    """The file as it was read, for W&B."""

    @property
    def fixed_overrides(self) -> list[str]:
        """Of the command and of the constants: the same in every run."""
        after = self.command[self.command.index(MODULE) + 1 :]
        own = [argument for argument in after if argument != ARGUMENTS]
        return own + [f"{name}={value}" for name, value in self.constants.items()]


def read_sweep(path: Path) -> Sweep:
    """Read and check a sweep file, in all but its agreement with the config.

    Raises:
        ConfigError: the first thing that is wrong with it.
    """
    source = _load(path)
    _check_keys(path, source)
    method, metric = source["method"], parse_metric(source.get("metric"))
    hyperband = parse_hyperband(source.get("early_terminate"))
    parameters, constants = parse_parameters(source["parameters"])
    if method not in METHODS:
        raise ConfigError(f"method={method!r} is unknown; choose one of {', '.join(METHODS)}")
    if "metric" not in source and (method == "bayes" or hyperband is not None):
        which = "method=bayes improves" if method == "bayes" else "early_terminate compares runs by"
        raise ConfigError(f"{which} a metric, and none is named; give metric: {{name: ..., goal: maximize}}")
    if not parameters:
        raise ConfigError(
            "parameters hold constants alone, so there is nothing to vary; give one of them values"
        )
    if method == "grid":
        for parameter in parameters:
            parameter.grid()
    return Sweep(
        name=str(source.get("name", path.stem)),
        method=method,
        metric=metric,
        parameters=tuple(parameters),
        constants=constants,
        hyperband=hyperband,
        run_cap=_run_cap(source.get("run_cap")),
        command=_command(source["command"]),
        source=source,
    )


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"there is no sweep file at {str(path)!r}; give a path such as sweeps/arms.yaml")
    try:
        text = path.read_text()
        _refuse_doubles(path, yaml.compose(text, yaml.SafeLoader))
        source = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(source, dict):
        raise ConfigError(f"{path} holds no keys with values; give {', '.join(NEEDED)}")
    return source


def _refuse_doubles(path: Path, node: Any) -> None:
    """Refuse a key that stands twice in one mapping, of which YAML would keep the last."""
    if isinstance(node, yaml.MappingNode):
        known: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in known:
                raise ConfigError(
                    f"{path}: {key.value} stands twice, in lines {known[key.value]} and {line}; leave one out"
                )
            known[str(key.value)] = line
            _refuse_doubles(path, value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_doubles(path, value)


def _check_keys(path: Path, source: dict[str, Any]) -> None:
    for key in source:
        if key not in KEYS:
            close = get_close_matches(str(key), KEYS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"a sweep has {', '.join(KEYS)}"
            raise ConfigError(f"{path}: unknown key {key!r}; {hint}")
    for key, advice in NEEDED.items():
        if key not in source:
            raise ConfigError(f"{path}: {key} is missing; {advice}")
    parameters = source["parameters"]
    for key in parameters if isinstance(parameters, dict) else ():
        if key in KEYS:
            raise ConfigError(
                f"parameters.{key} is no key of a run; it belongs at the top of the file, beside parameters"
            )


def _run_cap(value: Any) -> int | None:
    if value is None:
        return None
    if not is_count(value):
        raise ConfigError(f"run_cap={value!r} is no number of runs; give a whole number of at least 1")
    return value


def _command(value: Any) -> tuple[str, ...]:
    """The command as W&B takes it, which must hand the parameters to fit as overrides."""
    words = [str(word) for word in value] if isinstance(value, list) else []
    is_fit = MODULE in words and words[words.index(MODULE) - 1] == "-m"
    macros = [word for word in words if word.startswith("${args")]
    if not is_fit or macros != [ARGUMENTS] or words.index(ARGUMENTS) < words.index(MODULE):
        raise ConfigError(f"command={value!r} does not run fit with overrides; give {COMMAND_HINT}")
    return tuple(words)
