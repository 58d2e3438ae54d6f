"""From YAML to objects: trusted targets, checked signatures, rules between fields, all before any work."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from hydra import compose
from hydra.errors import InstantiationException
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


@contextmanager
def as_config_errors(where: str) -> Iterator[None]:
    """What a constructor or a loader says against a user's settings, said as a mistake of the config."""
    try:
        yield
    except ConfigError:
        raise
    except InstantiationException as error:
        raise ConfigError(f"{where}: {error.__cause__ or error}") from error
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise ConfigError(f"{where}: {error}") from error


def build(node: DictConfig) -> Any:
    """The object (or, under `_partial_`, the function) that a node with `_target_` describes.

    Raises:
        ConfigError: a target outside the trusted packages, or arguments that it does not take.
    """
    check_targets(node)
    with as_config_errors(node._target_):
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
            found = get_object(target)
        except Exception as error:
            raise ConfigError(f"{where}._target_={target!r} cannot be imported: {error}") from error
        # A trusted module also holds what it imports, torch.load among it; only what it defines is meant.
        home = f"{getattr(found, '__module__', None)}."
        if not (inspect.isclass(found) or inspect.isfunction(found)) or not home.startswith(TRUSTED):
            raise ConfigError(f"{where}._target_={target!r} is no class or function of a trusted package")
        signature = inspect.signature(found)
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


def check_keys(cfg: DictConfig, choices: Mapping[str, str | None], overrides: Sequence[str] = ()) -> None:
    """Refuse keys that no config group declares: Hydra merges a misspelt key of an experiment file silently.

    Args:
        choices: the option chosen in each group, as Hydra's runtime reports them.
        overrides: of the command line; what it adds with `+` is meant, and its target's signature judges it.

    Raises:
        ConfigError: naming the key and the closest one that exists.
    """
    presets = ("experiment", "debug")
    groups = [f"{name}={choice}" for name, choice in choices.items() if not name.startswith("hydra/")]
    plain = [choice for choice in groups if choice.split("=")[0] not in presets]
    declared = compose("config", overrides=[*plain, *(f"{name}=none" for name in presets)])
    known = set(_paths(OmegaConf.to_container(declared)))
    added = tuple(override.lstrip("+").split("=")[0] for override in overrides if override.startswith("+"))
    for path in _paths(OmegaConf.to_container(cfg)):
        if path not in known and path not in added and not path.startswith(tuple(f"{key}." for key in added)):
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
    for check in (
        _check_numbers,
        _check_stages,
        _check_paths,
        _check_cache,
        _check_sampling,
        _check_algorithm,
    ):
        check(cfg)
    _check_arm(cfg)
    build(cfg.task)
    if cfg.distillation is not None:
        build(cfg.distillation)


def _require(is_right: bool, message: str) -> None:
    if not is_right:
        raise ConfigError(message)


COUNTS = (
    "rollout.max_new_tokens",
    "rollout.n_prompts",
    "algorithm.group_size",
    "algorithm.n_iterations",
    "algorithm.n_epochs",
    "algorithm.n_minibatches",
    "algorithm.n_micro_batches",
    "roles.rank",
    "sft.n_steps",
    "sft.batch_size",
    "sft.n_pairs",
    "sft.steps_per_iteration",
    "evaluation.n_prompts",
    "evaluation.n_mismatch",
    "evaluation.batch_size",
    "callbacks.checkpoint_every",
    "callbacks.samples_every",
    "callbacks.n_samples",
)
AMOUNTS = (
    "rollout.temperature",
    "evaluation.temperature",
    "optimizer.lr",
    "sft.optimizer.lr",
    "sft.reward_weight",
)


def _check_numbers(cfg: DictConfig) -> None:
    for name in COUNTS:
        value = OmegaConf.select(cfg, name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        _require(is_count, f"{name}={value} is not a count; give a whole number of at least 1")
    for name in AMOUNTS:
        value = OmegaConf.select(cfg, name)
        is_amount = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        _require(is_amount, f"{name}={value} is not a number of at least 0; give one")


def _check_stages(cfg: DictConfig) -> None:
    _require(
        not isinstance(cfg.stages, str), f"stages={cfg.stages} is not a list; write stages=[{cfg.stages}]"
    )
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
    _require(
        cfg.fabric.devices in (1, "auto"),
        f"fabric.devices={cfg.fabric.devices}: a run is one process; give 1",
    )
    sft = cfg.sft
    _require(
        sft.n_steps % min(sft.steps_per_iteration, sft.n_steps) == 0,
        f"sft.n_steps={sft.n_steps} is no multiple of sft.steps_per_iteration={sft.steps_per_iteration}; "
        "make it one",
    )
    _require(
        sft.n_pairs <= sft.batch_size,
        f"sft.n_pairs={sft.n_pairs} is more than sft.batch_size={sft.batch_size}; lower it",
    )


def expanded(path: str | None) -> str | None:
    """A model path with `~` replaced; names on the hub stay as they are."""
    return str(Path(path).expanduser()) if path is not None and is_local(path) else path


def is_local(path: str) -> bool:
    """Whether a model path means a folder rather than a name on the hub, which is NAME or OWNER/NAME."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists()


def _check_paths(cfg: DictConfig) -> None:
    path = cfg.model.path
    if path is not None and is_local(path):
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


def _check_algorithm(cfg: DictConfig) -> None:
    algorithm = cfg.algorithm
    _require(
        algorithm.group_size >= 2,
        f"algorithm.group_size={algorithm.group_size}: a group baseline compares responses to one prompt; "
        "give at least 2",
    )
    _require(
        algorithm.lr_schedule in ("linear", "constant"),
        f"algorithm.lr_schedule={algorithm.lr_schedule!r} is unknown; choose linear or constant",
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
