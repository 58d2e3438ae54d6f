"""Compose a config by Hydra; its errors become one line with a hint at the key or option that exists."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from os.path import expanduser
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_rlkv.config.commands import EvaluateConfig, ExportConfig
from lit_rlkv.config.errors import ConfigError
from lit_rlkv.config.options import default_values
from lit_rlkv.config.schema import Config

PACKAGE_DIR = Path(__file__).parent.parent
SHIPPED_IN = PACKAGE_DIR if (PACKAGE_DIR / "conf").is_dir() else PACKAGE_DIR.parent
"""The package itself in a wheel, or the clone in an editable install."""
CONF_DIR, SWEEPS_DIR = SHIPPED_IN / "conf", SHIPPED_IN / "sweeps"

SCHEMAS: dict[str, type] = {"config": Config, "evaluate": EvaluateConfig, "export": ExportConfig}
"""Schema of each program's config, by the config's name in conf/."""
PROGRAMS = {"config": "fit"}
"""The program of a config whose name is another."""
for _name, _schema in SCHEMAS.items():
    ConfigStore.instance().store(f"{_name}_defaults", default_values(_schema))
SEVERAL = "several runs are a sweep; write a file such as sweeps/arms.yaml, and python -m lit_rlkv.sweep FILE"


def check_command_line(name: str, arguments: Sequence[str]) -> DictConfig | None:
    """The config of a program, composed before Hydra does that.

    Options such as --help mean something to Hydra alone, and all is left to it: None.

    Raises:
        ConfigError: it does not compose, or asks for several runs.
    """
    if {"-m", "--multirun"} & set(arguments):
        raise ConfigError(f"--multirun: {SEVERAL}")
    overrides = _without_views(arguments)
    for argument, following in pairwise([*overrides, ""]):
        group = argument.lstrip("-")
        choices = options_of(group) if "=" not in argument else []
        if argument.startswith("-") and not choices:
            return None
        if "=" not in argument and not argument.startswith("~"):
            value = following if following in choices else "..."
            raise ConfigError(f"{argument!r} sets nothing; write {group}={value}")
    return composed(name, overrides)


def _without_views(arguments: Sequence[str]) -> list[str]:
    """The same without options that ask to see the config, `--cfg job` and `--resolve`."""
    rest = list(arguments)
    for place, argument in reversed([*enumerate(arguments)]):
        if argument in ("--cfg", "-c"):
            del rest[place : place + 2]
        elif argument.startswith("--cfg=") or argument == "--resolve":
            del rest[place]
    return rest


def composed(name: str, overrides: Sequence[str]) -> DictConfig:
    """A config with Hydra's own node in it, as a program with these overrides composes it.

    Raises:
        ConfigError: it does not compose.
    """
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        try:
            return compose(name, overrides=list(overrides), return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(friendly_error(error, overrides, name)) from error


def friendly_error(error: Exception, overrides: Sequence[str], name: str = "config") -> str:
    """Return Hydra's error in one line, with the options of a group or a key that exists.

    Hydra must be initialised with CONF_DIR.
    """
    for override in overrides:
        group, _, option = override.lstrip("+").partition("=")
        options = options_of(group)
        if options and set(option.split(",")) <= set(options) and "," in option:
            return f"{group}={option}: {SEVERAL}"
        if options and option.strip("'\"") not in options:
            return f"{group} must be one of {', '.join(options)}, got {option}"
    for override in overrides:
        if (said := _unreadable(override)) is not None:
            return said
    unknown = re.match(r"Could not override '([\w.]+)'", str(error))
    if unknown is None:
        return " ".join(str(error).split())
    return f"unknown key {unknown[1]!r}: {_closest(unknown[1], overrides, name)}"


def _unreadable(override: str) -> str | None:
    """Return how to quote a value that Hydra's grammar misreads; None if it reads it."""
    key, sign, value = override.partition("=")
    shown = f'"{key}={quoted(expanduser(value))}"'
    try:
        read = OverridesParser.create().parse_override(override)
    except HydraException:
        return f"{override}: the value cannot be read as it stands; quote it: {shown}" if sign else None
    if not read.is_sweep_override():
        return None
    return f"{override}: quote it if it is one value, {shown}, or give a list, {key}=[{value}]; {SEVERAL}"


def quoted(value: str) -> str:
    """A value as Hydra's grammar takes it for a text, whatever is in it."""
    escaped = value.replace("'", "\\'")
    return f"'{escaped}'"


def options_of(group: str) -> list[str]:
    """Return the options of a config group; none if there is no such group."""
    if not group.isidentifier():
        return []
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def _closest(key: str, overrides: Sequence[str], name: str) -> str:
    """A hint at a key of the options that are chosen, or else of another option of the same group."""
    chosen = [override for override in overrides if options_of(override.partition("=")[0])]
    known = set(_nodes(OmegaConf.to_container(compose(name, overrides=chosen))))
    group = key.split(".")[0]
    elsewhere = {
        other: f"{group}={option}"
        for option in options_of(group)
        for other in _nodes_of_option(group, option)
        if other not in known
    }
    if key in elsewhere:
        return f"{elsewhere[key]} has it"
    close = closest(key, known | elsewhere.keys())
    if close is None:
        return f"python -m lit_rlkv.{PROGRAMS.get(name, name)} --cfg job shows all"
    of_option = f" of {elsewhere[close]}" if close in elsewhere else ""
    return f"did you mean {close!r}{of_option}?"


def _nodes_of_option(group: str, option: str) -> Iterator[str]:
    path = CONF_DIR / group / f"{option}.yaml"
    if not path.read_text(encoding="utf-8").startswith("# @package _global_"):
        nodes = _nodes(OmegaConf.to_container(OmegaConf.load(path)), f"{group}.")
        # The list of files that a file is built on is no key of it.
        yield from (node for node in nodes if node != f"{group}.defaults")


def _nodes(node: Any, prefix: str = "") -> Iterator[str]:
    """Every key below a node, those that have keys of their own among them."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _nodes(value, f"{prefix}{key}.")


TRL_VERL_ALIASES = {
    "num_generations": "algorithm.group_size",
    "rollout.n": "algorithm.group_size",
    "num_iterations": "algorithm.n_epochs",
    "ppo_epochs": "algorithm.n_epochs",
    "max_steps": "algorithm.n_iterations",
    "total_training_steps": "algorithm.n_iterations",
    "gradient_accumulation_steps": "algorithm.n_micro_batches",
    "train_batch_size": "rollout.n_prompts",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "beta": "algorithm.kl.weight",
    "kl_coef": "algorithm.kl.weight",
}
"""Names of TRL and verl, by their ends, and what does the same here; README says what counts otherwise."""


def closest(key: str, known: Collection[str]) -> str | None:
    """The known key that was meant, if any; never one that the given key lies below."""
    names = key.split(".")
    ends = [".".join(names[start:]) for start in range(len(names))]
    own = [one for one in known if "." not in key and one.endswith(f".{key}")]
    meant = [TRL_VERL_ALIASES[end] for end in ends if end in TRL_VERL_ALIASES]
    # A group may have the setting for itself, as sft its optimizer.
    for candidate in (*(f"{names[0]}.{one}" for one in meant), *(own if len(own) == 1 else ()), *meant):
        if candidate in known and candidate != key:
            return candidate
    others = sorted(one for one in known if not key.startswith(f"{one}."))
    return next(iter(get_close_matches(key, others, n=1)), None)
