"""From YAML to objects: trusted targets, checked signatures, rules between fields, all before any work."""

import inspect
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from hydra import compose
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from lit_rlkv.advantages import group
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.objectives.aggregate import AGGREGATIONS

PACKAGE_DIR = Path(__file__).parent
SHIPPED, CLONED = PACKAGE_DIR / "conf", PACKAGE_DIR.parent / "conf"
CONF_DIR = SHIPPED if SHIPPED.is_dir() else CLONED
"""The configs of the wheel, or those of the clone in an editable install."""

TRUSTED = ("lit_rlkv.", "torch.optim.", "lightning.pytorch.loggers.")
STAGES = ("sft", "rl", "eval")
WEIGHT_DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float32,
    "bf16-mixed": torch.float32,
}
"""Fabric's precisions, and what weights are stored in under each."""


class ConfigError(ValueError):
    """A mistake in the configuration: what was given, why it is wrong, what to do."""


def build(node: DictConfig) -> Any:
    """The object (or, under `_partial_`, the function) that a node with `_target_` describes.

    Raises:
        ConfigError: a target outside the trusted packages, or arguments that it does not take.
    """
    check_targets(node)
    return instantiate(node)


def check_targets(node: Any, path: str = "") -> None:
    """Check every `_target_` below a node against the trusted packages and its signature; build nothing."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=True)
    for where, target, arguments in _targets(node, path):
        if not target.startswith(TRUSTED):
            raise ConfigError(
                f"{where}._target_={target!r} is not from a trusted package ({', '.join(TRUSTED)}); "
                "a config must not name code of its own"
            )
        try:
            signature = inspect.signature(get_object(target))
        except Exception as error:
            raise ConfigError(f"{where}._target_={target!r} cannot be imported: {error}") from error
        takes = list(signature.parameters)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        for name in arguments:
            if name not in takes and not takes_any:
                raise ConfigError(f"{target}: unexpected {name!r}; it takes {', '.join(takes)}")


def _targets(node: Any, path: str) -> Iterator[tuple[str, str, list[str]]]:
    """Every (path, target, argument names) in a plain config."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield path, node["_target_"], [name for name in node if not name.startswith("_")]
        for key, value in node.items():
            yield from _targets(value, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _targets(value, f"{path}.{index}")


def check_keys(cfg: DictConfig, choices: Mapping[str, str | None]) -> None:
    """Refuse keys that no config group declares: Hydra merges a misspelt key of an experiment file silently.

    Args:
        choices: the option chosen in each group, as Hydra's runtime reports them.

    Raises:
        ConfigError: naming the key and the closest one that exists.
    """
    presets = ("experiment", "debug")
    groups = [f"{name}={choice}" for name, choice in choices.items() if not name.startswith("hydra/")]
    plain = [choice for choice in groups if choice.split("=")[0] not in presets]
    declared = compose("config", overrides=[*plain, *(f"{name}=none" for name in presets)])
    known = set(_paths(OmegaConf.to_container(declared)))
    for path in _paths(OmegaConf.to_container(cfg)):
        if path not in known:
            close = get_close_matches(path, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see --cfg job for all keys"
            raise ConfigError(f"unknown key {path!r} in the experiment or debug preset: {hint}")


def _paths(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _paths(value, f"{prefix}{key}.")
    else:
        yield prefix.rstrip(".")


def check_config(cfg: DictConfig) -> None:
    """Every rule that a run must satisfy, in the order in which a user would meet them.

    Raises:
        ConfigError: the first rule that is broken.
    """
    check_targets(cfg)
    for check in (_check_stages, _check_paths, _check_cache, _check_sampling, _check_algorithm, _check_arm):
        check(cfg)


def _require(is_right: bool, message: str) -> None:
    if not is_right:
        raise ConfigError(message)


def _check_stages(cfg: DictConfig) -> None:
    stages = list(cfg.stages)
    unknown = [stage for stage in stages if stage not in STAGES]
    _require(
        not unknown,
        f"stages={stages}: unknown {', '.join(map(str, unknown))}; choose from {', '.join(STAGES)}",
    )
    _require(bool(stages), f"stages={stages} leaves nothing to do; choose from {', '.join(STAGES)}")
    _require(
        cfg.fabric.precision in WEIGHT_DTYPES,
        f"fabric.precision={cfg.fabric.precision!r} is unknown; choose one of {', '.join(WEIGHT_DTYPES)}",
    )


def _check_paths(cfg: DictConfig) -> None:
    path = cfg.model.path
    if path is not None and str(path).startswith((".", "/", "~")):
        _require(
            (Path(path).expanduser() / "config.json").is_file(),
            f"model.path={path} is not a checkpoint folder (no config.json there); give a folder written by "
            "save_pretrained, or a hub name",
        )
    if path is None and not cfg.model.preset:
        raise ConfigError("model has neither path nor preset; give model.path=... or model=tiny")


def _check_cache(cfg: DictConfig) -> None:
    try:
        CacheSpec(**cfg.cache)
        for budget in cfg.evaluation.budgets:
            CacheSpec(**{**cfg.cache, "budget": budget})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"cache: {error}") from error


def _check_sampling(cfg: DictConfig) -> None:
    rollout = cfg.rollout
    for name, off in {"top_p": 1.0, "top_k": None}.items():
        _require(
            rollout[name] == off,
            f"rollout.{name}={rollout[name]} cannot be replayed: the learner would have to renormalise over "
            "the very tokens that the sampler kept, which are not recorded; "
            f"use rollout.{name}={'null' if off is None else off}",
        )
    _require(
        rollout.temperature > 0,
        f"rollout.temperature={rollout.temperature}: the policy gradient needs a distribution; "
        "give more than 0",
    )
    for name in ("max_new_tokens", "n_prompts"):
        _require(rollout[name] >= 1, f"rollout.{name}={rollout[name]} samples nothing; give at least 1")


def _check_algorithm(cfg: DictConfig) -> None:
    algorithm = cfg.algorithm
    _require(
        algorithm.group_size >= 2,
        f"algorithm.group_size={algorithm.group_size}: a group baseline compares responses to one prompt; "
        "give at least 2",
    )
    tables: dict[str, Mapping[str, object]] = {
        "advantage": group.ESTIMATORS,
        "aggregation": AGGREGATIONS,
    }
    for name, table in tables.items():
        _require(
            algorithm[name] in table,
            f"algorithm.{name}={algorithm[name]!r} is unknown; choose one of {', '.join(table)}",
        )
    n_rows = cfg.rollout.n_prompts * algorithm.group_size
    n_parts = algorithm.n_minibatches * algorithm.n_micro_batches
    _require(
        1 <= n_parts <= n_rows,
        f"n_minibatches × n_micro_batches = {n_parts} parts cannot be cut from {n_rows} responses; "
        "lower them",
    )


def _check_arm(cfg: DictConfig) -> None:
    is_dense = cfg.correction.samples_dense or cfg.cache.policy == "dense"
    _require(
        cfg.distillation is None or not is_dense,
        "distillation needs an evicting cache in the rollouts: with a dense one both tracks are the same; "
        "use distillation=none, or another correction and cache.policy",
    )
