"""The config of a run that is resumed, read and compared without torch, so that mistakes are told at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_rlkv.config.composing import CONF_DIR
from lit_rlkv.config.errors import ConfigError, one_line, require
from lit_rlkv.config.keys import PRESETS, check_keys
from lit_rlkv.config.options import check_leaves, default_values, leaves
from lit_rlkv.config.parsing import AUTO, check_types
from lit_rlkv.config.run_labels import Choices
from lit_rlkv.config.schema import Config
from lit_rlkv.config.targets import NO_DEFAULT, OURS, check_saved_code, default_argument
from lit_rlkv.files import MAX_CONFIG_BYTES, check_yaml, read_text
from lit_rlkv.run_files import CONFIG
from lit_rlkv.trust import KEY, is_trusted

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
        require(isinstance(saved, DictConfig) and bool(saved), "it has no keys")
        check_leaves(OmegaConf.to_container(saved, resolve=False))  # nothing reads the reader's environment
        if OmegaConf.select(saved, "correction.replays") is not None:  # a run from before bypass_mode
            saved.correction.setdefault("bypass_mode", saved.correction.replays)
        completed = cast(DictConfig, OmegaConf.merge(default_values(Config), {"logger": None}, saved))
        OmegaConf.resolve(completed)
        check_types(completed)
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{path} cannot be used: {one_line(error)}; restore it if it is damaged, use the version of "
            "lit_rlkv that wrote it, or start a new run"
        ) from error
    return completed


def load_resumed_config(cfg: DictConfig, given: Choices) -> tuple[Path, DictConfig, Choices | None]:
    """Return folder and config of the run that `resume` names, with the overrides that may change.

    The choices of the run come third; None for a run of an earlier version, which has not saved them.

    Args:
        given: the choices of this command line.

    Raises:
        ConfigError: the folder holds no run, a damaged one, or one with another config; the error then names
            the differences. A key does not exist.
    """
    run_dir = Path(cfg.resume)
    require(
        (run_dir / CONFIG).is_file(),
        f"resume={cfg.resume} is not a run folder (no {CONFIG} there); give one under {cfg.runs_dir}/, or "
        f"resume={AUTO}",
    )
    saved = read_config(run_dir)
    asked = _with_overrides(saved, cfg, given.overrides)
    started = Choices.load(run_dir)
    choices = None if started is None else started.with_more(given)
    if choices is not None:
        check_keys(asked, choices.options, choices.overrides)
    logger = str(asked.logger and asked.logger.get("_target_"))
    is_given = any(override.lstrip("+").startswith("logger=") for override in given.overrides)
    shipped = [OmegaConf.load(path) for path in (CONF_DIR / "logger").glob("*.yaml")]
    is_harmless = asked.logger in shipped or logger.startswith(OURS)  # they write into the run's folder
    require(
        asked.logger is None or is_given or is_trusted(logger) or is_harmless,
        f"logger._target_={logger} of the saved config may write anywhere; if it may, give logger=... with "
        "its keys again on the command line, else logger=csv",
    )
    check_same_config(saved, asked, run_dir)
    check_saved_code(saved.reward.functions)
    return run_dir, asked, choices


def check_same_config(saved: DictConfig, asked: DictConfig, run_dir: Path) -> None:
    """Check that a run is resumed with its own config.

    Raises:
        ConfigError: the configs differ in a setting that training depends on.
    """
    found = differences(saved, asked)
    changed = [f"{name}: {was} -> {now}" for name, (was, now) in found.items()]
    why = (
        f"{run_dir} holds a run with another config, which cannot change on resume; leave out what differs, "
        "or start another run in a folder of its own:"
    )
    if "algorithm.n_iterations" in found:  # whose number decides all learning rates
        changed.append(
            "(a run is extended only with algorithm.lr_schedule=constant from its start; to train on: python "
            f"-m lit_rlkv.export ckpt={run_dir} to=FOLDER, and a new run with model.path=FOLDER "
            "'stages=[rl,eval]')"
        )
    require(not changed, "\n  ".join([why, *changed]))


def differences(saved: DictConfig, asked: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that training depends on and that differ, each with its old and new value.

    An argument that one config leaves out has its default, as for a run from before the argument existed.
    """
    was, now = (dict(leaves(OmegaConf.to_container(cfg, resolve=True))) for cfg in (saved, asked))
    found = {}
    for name in dict.fromkeys((*was, *now)):
        if not _decides(name, saved) or was.get(name, NO_DEFAULT) == now.get(name, NO_DEFAULT):
            continue
        node, _, argument = name.rpartition(".")
        target, default = was.get(f"{node}._target_"), NO_DEFAULT
        if (name in was) != (name in now) and target is not None and target == now.get(f"{node}._target_"):
            default = default_argument(target, argument)
        old, new = was.get(name, default), now.get(name, default)
        if old != new:
            found[name] = "nothing" if old is NO_DEFAULT else old, "nothing" if new is NO_DEFAULT else new
    return found


def _decides(name: str, saved: DictConfig) -> bool:
    if name == "algorithm.n_iterations":  # the learning rate of the iterations so far may depend on it
        return bool(saved.algorithm.lr_schedule != "constant")
    if name == "reward.accuracy":
        return saved.algorithm.curriculum.decay is not None or saved.sft.on_policy_pairs.n_prompts > 0
    return name in DECIDES or name.partition(".")[0] not in MAY_CHANGE


def _with_overrides(saved: DictConfig, cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the config of the run with the overrides of the command line."""
    asked = saved.copy()
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        # A preset sets keys everywhere.
        require(key not in PRESETS, f"{override}: a resumed run takes no preset; give single settings")
        if key not in ("resume", KEY) and key.partition(".")[0] != "hydra":  # which fit answers itself
            # The key, or the first parent of it that is None, such as a diagnostic that was off.
            names = key.split(".")
            above = (".".join(names[:n]) for n in range(1, len(names)))
            place = next((name for name in above if OmegaConf.select(asked, name) is None), key)
            OmegaConf.update(asked, place, OmegaConf.select(cfg, place), merge=False, force_add=True)
    return asked
