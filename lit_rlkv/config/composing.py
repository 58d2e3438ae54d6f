"""Compose a config by Hydra; its errors become one line with a hint at the key or option that exists."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from functools import cache
from os.path import expanduser
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_rlkv.config.commands import EvaluateConfig, ExportConfig
from lit_rlkv.config.errors import ConfigError, interpolations_as_config_errors, require
from lit_rlkv.config.hints import hint
from lit_rlkv.config.options import INTERPOLATION, default_values, leaf_keys, leaves, show
from lit_rlkv.config.schema import Config

PACKAGE_DIR = Path(__file__).parent.parent
SHIPPED_IN = PACKAGE_DIR if (PACKAGE_DIR / "conf").is_dir() else PACKAGE_DIR.parent
"""The package itself in a wheel, or the clone in an editable install."""
CONF_DIR, SWEEPS_DIR = SHIPPED_IN / "conf", SHIPPED_IN / "sweeps"

PRESETS = ("experiment", "recipe", "debug")
"""Groups that set keys of others and have none of their own."""
SCHEMAS: dict[str, type] = {"config": Config, "evaluate": EvaluateConfig, "export": ExportConfig}
"""Schema of each program's config, by the config's name in conf/."""
PROGRAMS = {"config": "fit"}
"""The program of a config whose name is another."""
for _name, _schema in SCHEMAS.items():
    ConfigStore.instance().store(f"{_name}_defaults", default_values(_schema))
INSTEAD_OF_OPTIONS = {
    "model": "a checkpoint folder or hub name is model.path={}",
    "task": "data of your own are task=dataset task.dataset={}",
    "reward": "a function of your own is reward=python reward.functions.custom.path=FILE:FUNCTION",
    "optimizer": "another one of torch.optim is optimizer._target_=torch.optim.NAME",
}
"""How to write what is given in place of an option, by the group."""
SEVERAL = "several runs are a sweep; write a file such as sweeps/arms.yaml, and python -m lit_rlkv.sweep FILE"


def initialized() -> AbstractContextManager[Any]:
    """Initialise Hydra with CONF_DIR, unless the caller has initialised it."""
    if GlobalHydra.instance().is_initialized():
        return nullcontext()
    return initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR))


def composed(name: str, overrides: Sequence[str]) -> DictConfig:
    """Return the config that a program with these overrides composes, with Hydra's own node in it.

    Raises:
        ConfigError: it does not compose.
    """
    with initialized():
        try:
            cfg = compose(name, overrides=list(overrides), return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(friendly_error(error, overrides, name)) from error
    # The key that a value refers to may be one that is taken away, which check_keys answers.
    if not any(override.startswith("~") for override in overrides):
        with interpolations_as_config_errors():
            _resolve(cfg)
    return cfg


def _resolve(cfg: DictConfig) -> None:
    """Resolve every value once, but for Hydra's own node, whose values are known when it starts.

    Raises:
        InterpolationResolutionError: a value refers to nothing.
        ConfigError: a text has `${` after that, which the saved config of the run would resolve once more.
    """
    for key in cfg:
        if key == "hydra" or OmegaConf.is_missing(cfg, key):
            continue
        value = cfg[key]
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        for name, leaf in leaves(plain, str(key)):
            require(
                INTERPOLATION not in str(leaf),
                f"{name}={show(leaf)}: a text cannot have {INTERPOLATION!r} in it, because a config reads a "
                "reference to another key there; use other text",
            )


def friendly_error(error: Exception, overrides: Sequence[str], name: str = "config") -> str:
    """Return Hydra's error in one line, with the options of a group or a key that exists.

    Hydra must be initialised with CONF_DIR.
    """
    for override in overrides if name == "config" else ():
        group, _, option = override.lstrip("+").partition("=")
        options = options_of(group)
        if options and set(option.split(",")) <= set(options) and "," in option:
            return f"{group}={option}: {SEVERAL}"
        if options and option.strip("'\"") not in options:
            return f"{group} must be one of {', '.join(options)}, got {option}{_option_meant(group, option)}"
    for override in overrides:
        if (said := _unreadable(override)) is not None:
            return said
    unknown = re.match(r"Could not override '([\w.]+)'", str(error))
    if unknown is None:
        return " ".join(str(error).split())
    return f"unknown key {unknown[1]!r}: {hint_at(unknown[1], name, overrides)}"


def _option_meant(group: str, option: str) -> str:
    """Return how to write what has no option of its own, such as a path; empty if that cannot be told."""
    if close := get_close_matches(option.lower(), options_of(group), n=1):
        return f"; did you mean {group}={close[0]}?"
    return f"; {INSTEAD_OF_OPTIONS[group].format(option)}" if group in INSTEAD_OF_OPTIONS else ""


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
    """Return a text quoted for Hydra's grammar."""
    escaped = value.replace("'", "\\'")
    return f"'{escaped}'"


def options_of(group: str) -> list[str]:
    """Return the options of a config group; none if there is no such group."""
    if not group.isidentifier():
        return []
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def groups() -> list[str]:
    """Return the names of the config groups, which have options."""
    return sorted(path.name for path in CONF_DIR.iterdir() if path.is_dir())


@cache
def known_keys(name: str, chosen: tuple[str, ...] = ()) -> frozenset[str]:
    """Return every key of a program's config with these options chosen. Hydra must be initialised."""
    return frozenset(_nodes(OmegaConf.to_container(compose(name, overrides=list(chosen)))))


@cache
def keys_of_options() -> dict[str, str]:
    """Return the keys of all options, each with the first option that has it."""
    found: dict[str, str] = {}
    for group in groups():
        for option in options_of(group):
            for key in _nodes_of_option(group, option):
                found.setdefault(key, f"{group}={option}")
    return found


def hint_at(key: str, name: str, overrides: Sequence[str] = ()) -> str:
    """Return what to write instead of an unknown key of a program. Hydra must be initialised."""
    chosen = tuple(override for override in overrides if options_of(override.partition("=")[0]))
    known = known_keys(name, chosen)
    others = keys_of_options() if name == "config" else {}
    return hint(key, known, {other: option for other, option in others.items() if other not in known})


def check_keys(cfg: DictConfig, choices: Mapping[str, str | None], overrides: Sequence[str] = ()) -> None:
    """Refuse what Hydra merges without a word: null over `???` of a preset, and what `~` takes away.

    Unknown keys are refused by the schema and by the signatures of what a config builds.

    Args:
        choices: the option chosen in each group, as Hydra's runtime reports them.
        overrides: of the command line.

    Raises:
        ConfigError: naming the key.
    """
    for name in PRESETS:
        preset = CONF_DIR / name / f"{choices.get(name)}.yaml"
        for key in OmegaConf.missing_keys(OmegaConf.load(preset)) if preset.is_file() else ():
            if OmegaConf.select(cfg, key) is None:
                raise ConfigError(f"{name}={preset.stem} needs {key}, which is not given; add {key}=...")
    read = {key for key, _, _ in leaf_keys(Config)}
    for key in (override[1:].partition("=")[0] for override in overrides if override[:1] == "~"):
        if any(f"{one}.".startswith(f"{key}.") for one in (*read, "diagnostics._target_")):
            off = f"{key}=none" if (CONF_DIR / key / "none.yaml").is_file() else f"{key}=..."
            raise ConfigError(f"~{key} takes away what every run reads; write {off}")


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
