"""The config of a run that is resumed, read and compared without torch, so that mistakes are told at once."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_rlkv.config.composing import PRESETS
from lit_rlkv.config.errors import ConfigError, one_line, require
from lit_rlkv.config.options import INTERPOLATION, default_values, leaves, show
from lit_rlkv.config.parsing import AUTO, check_types
from lit_rlkv.config.run_labels import LABELS, OURS, Choices
from lit_rlkv.config.schema import Config
from lit_rlkv.config.targets import NO_DEFAULT, check_saved_code, default_argument
from lit_rlkv.files import MAX_CONFIG_BYTES, check_yaml, read_text
from lit_rlkv.run_files import CONFIG
from lit_rlkv.trust import KEY

MAY_CHANGE = (
    "callbacks",
    "diagnostics",
    "logger",
    "evaluation",
    "fabric",
    "stages",
    "runs_dir",
    "resume",
    KEY,
)
"""Settings that may change on resume, because training computes the same."""
DECIDES = ("fabric.precision", "fabric.quantization")
"""Exceptions below those settings."""
N_SHOWN = 8
"""Differences to name in an error; the others are counted."""
NODES = ("task", "model", "cache", "rollout", "algorithm", "reward", "fabric", "correction", "optimizer")
"""Nodes that the config of every run has."""
OPTIONAL: dict[str, Any] = {"diagnostics": {}, "logger": None}
"""Nodes without which a run trains the same."""


def read_config(run_dir: Path) -> DictConfig:
    """Return the saved config of a run folder, with the defaults of keys that are newer than the run.

    Raises:
        ConfigError: the file cannot be read, or is not the config of a run.
    """
    path = run_dir / CONFIG
    try:
        text = read_text(path, MAX_CONFIG_BYTES)
        check_yaml(text)
        saved = OmegaConf.create(text)
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path} cannot be read: {one_line(error)}; restore it, or start a new run"
        ) from error
    nodes = saved if isinstance(saved, DictConfig) else OmegaConf.create()
    for key, value in leaves(OmegaConf.to_container(nodes, resolve=False)):
        require(  # it could read the environment of its reader
            INTERPOLATION not in str(value),
            f"{path}: {key}={show(value)} is an interpolation, but a saved config has plain values alone; "
            "write the value itself, or start a new run",
        )
    missing = [key for key in NODES if not isinstance(nodes.get(key), DictConfig)]
    missing += [] if "distillation" in nodes else ["distillation"]
    require(
        not missing,
        f"{path} is damaged, as it lacks {', '.join(missing)}; restore it, or start a new run",
    )
    nodes.correction.setdefault("bypass_mode", nodes.correction.get("replays"))  # runs from before this key
    try:
        completed = cast(DictConfig, OmegaConf.merge(default_values(Config), OPTIONAL, nodes))
        OmegaConf.resolve(completed)
        check_types(completed)
    except (ConfigError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path} cannot be used: {one_line(error)}; restore it if it is damaged, use the version of "
            "lit_rlkv that wrote it, or start a new run"
        ) from error
    return completed


def load_resumed_config(cfg: DictConfig, overrides: Sequence[str] = ()) -> tuple[Path, DictConfig]:
    """Return the folder and config of the run that `resume` names, with the overrides that may change.

    Raises:
        ConfigError: the folder holds no run, a damaged one, or one with another config; the error then names
            the differences.
    """
    run_dir = Path(cfg.resume)
    if not (run_dir / CONFIG).is_file():
        raise ConfigError(
            f"resume={cfg.resume} is not a run folder (no {CONFIG} there); give one under {cfg.runs_dir}/, "
            f"or resume={AUTO}"
        )
    saved = read_config(run_dir)
    asked = _with_overrides(saved, cfg, overrides)
    check_saved_logger(asked.logger, run_dir, overrides)
    _keep_labels(saved, asked)
    check_same_config(saved, asked, run_dir)
    check_saved_code(saved.reward.functions)
    return run_dir, asked


def check_saved_logger(logger: DictConfig | None, run_dir: Path, overrides: Sequence[str] = ()) -> None:
    """Check that a saved logger is one of ours, which write into their run's folder alone, or is given again.

    Raises:
        ConfigError: naming the logger, and how the command line allows it.
    """
    is_given = any(re.match(r"\+{0,2}logger[.=]", override) for override in overrides)
    require(
        logger is None or is_given or logger._target_.startswith(OURS),
        f"logger={logger and logger._target_} of {run_dir} may write anywhere; if you trust it, give "
        "logger=... with its keys again on the command line, else logger=csv",
    )


def resumed_choices(run_dir: Path, choices: Choices) -> Choices | None:
    """Return the choices with which a run was started, with those of the command line that resumes it.

    None for a run of an earlier version, which has not saved them.

    Args:
        choices: of this command line.
    """
    saved = Choices.load(run_dir)
    return None if saved is None else saved.with_more(choices)


def check_same_config(saved: DictConfig, asked: DictConfig, run_dir: Path) -> None:
    """Check that a run is resumed with its own config.

    Raises:
        ConfigError: the configs differ in a setting that training depends on.
    """
    changed = differences(saved, asked)
    if changed:
        lines = [f"{name}: {was} -> {now}" for name, (was, now) in changed.items()]
        more = [f"and {len(lines) - N_SHOWN} more"] if len(lines) > N_SHOWN else []
        why = (
            f"{run_dir} holds a run with another config, which cannot change on resume; leave out what "
            "differs, or start another run in a folder of its own:"
        )
        raise ConfigError("\n  ".join([why, *lines[:N_SHOWN], *more]))


def differences(saved: DictConfig, asked: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that training depends on and that differ, each with its old and new value.

    An argument that one config leaves out has its default, as for a run from before the argument existed.
    """
    was, now = (_flat(OmegaConf.to_container(cfg, resolve=True)) for cfg in (saved, asked))
    names = [*was, *(name for name in now if name not in was)]
    for name in was.keys() ^ now.keys():
        if _decides(name, saved):
            _fill_in(name, was, now)
    return {
        name: (was.get(name, "nothing"), now.get(name, "nothing"))
        for name in names
        if _decides(name, saved) and was.get(name, _MISSING) != now.get(name, _MISSING)
    }


def _fill_in(name: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Give an argument that one of two flat configs lacks its default, if both name the same class."""
    node, _, argument = name.rpartition(".")
    target = one.get(f"{node}._target_")
    if target is not None and target == other.get(f"{node}._target_"):
        default = default_argument(target, argument)
        if default is not NO_DEFAULT:
            one.setdefault(name, default)
            other.setdefault(name, default)


def _decides(name: str, saved: DictConfig) -> bool:
    if name == "algorithm.n_iterations":  # the learning rate of the iterations so far may depend on it
        return bool(saved.algorithm.lr_schedule != "constant")
    return name in DECIDES or name.split(".")[0] not in MAY_CHANGE


_MISSING = object()


def _flat(node: Any, path: str = "") -> dict[str, Any]:
    """Return every leaf by its dotted path; lists are leaves."""
    if not isinstance(node, Mapping):
        return {path: node}
    return {
        name: value
        for key, below in node.items()
        for name, value in _flat(below, f"{path}.{key}".lstrip(".")).items()
    }


def _with_overrides(saved: DictConfig, cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the config of the run with the overrides of the command line."""
    asked = saved.copy()
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key in PRESETS:  # a preset sets keys everywhere
            raise ConfigError(
                f"{override}: a resumed run takes no preset; give the single settings to change"
            )
        if key not in ("resume", KEY):
            # The key, or the first parent of it that is None, such as a diagnostic that was off.
            names = key.split(".")
            above = (".".join(names[:n]) for n in range(1, len(names)))
            place = next((name for name in above if OmegaConf.select(asked, name) is None), key)
            OmegaConf.update(asked, place, OmegaConf.select(cfg, place), merge=False, force_add=True)
    return asked


def _keep_labels(saved: DictConfig, asked: DictConfig) -> None:
    """Give a logger that is chosen anew the labels of the run."""
    before, now = saved.get("logger"), asked.get("logger")
    if before is not None and now is not None:
        for key in LABELS:
            if now.get(key, "") is None and before.get(key) is not None:
                now[key] = before[key]
