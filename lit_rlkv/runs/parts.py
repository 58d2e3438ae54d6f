"""The objects that a config names, built: classes of the right kind, with the arguments that they take."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from lightning import Callback
from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer

from lit_rlkv.callbacks.diagnostic import Diagnostic
from lit_rlkv.callbacks.hooks import RLCallback, check_hooks
from lit_rlkv.config import Config, ConfigError, as_config_errors, build, require
from lit_rlkv.config.options import named_items
from lit_rlkv.config.schema import AlgorithmConfig, RewardConfig
from lit_rlkv.environments import Environment
from lit_rlkv.experience.advantages import AdvantageEstimator
from lit_rlkv.experience.reward import RewardRule
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.objectives.corrections import Correction
from lit_rlkv.rewards import RewardFunction
from lit_rlkv.tasks import Task


class Parts:
    """The objects that a config names, each built once; of the user's code the constructors alone run.

    Raises:
        ConfigError: an object cannot be built, or is of the wrong kind.
    """

    def __init__(self, cfg: Config) -> None:
        with as_config_errors("cache"):
            self.cache = CacheSpec.of(cfg.cache)
            """The cache of the config; a correction may sample rollouts with a dense one instead."""
        user_callbacks = _built_each("user_callbacks", cfg.user_callbacks, Callback)
        with as_config_errors("user_callbacks"):
            check_hooks(user_callbacks.values())
        self.user_callbacks: list[Callback] = [*user_callbacks.values()]
        self.task: Task = _built("task", cfg.task, Task)
        self.environment_factory = build_environment_factory(cfg)
        """Makes the environment of one response; None: responses have one turn."""
        self.advantage: AdvantageEstimator = _built(
            "algorithm.advantage", cfg.algorithm.advantage, AdvantageEstimator
        )
        self.correction: Correction = build(cfg.correction)
        self.optimizer = _build_optimizer("optimizer", cfg.optimizer)
        self.sft_optimizer = _build_optimizer("sft.optimizer", cfg.sft.optimizer)
        self.module = _build_module(cfg.algorithm)
        """Makes the module of the algorithm from roles and an optimizer."""
        self.reward_functions = build_reward_functions(cfg.reward)
        self.distillation: RLCallback | None = None if cfg.distillation is None else build(cfg.distillation)
        self.diagnostics: list[Diagnostic] = [
            build(node) for node in cfg.diagnostics.values() if node is not None
        ]
        self.logger = None if cfg.logger is None else build(cfg.logger)
        """A logger, or the function that makes one of Lightning's; None without any."""

    @property
    def has_critic(self) -> bool:
        return "value" in self.advantage.needs


def _built(name: str, node: Any, kind: type) -> Any:
    """Return the object of a key, which must be of a kind."""
    try:
        found = build(node)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    require(
        isinstance(found, kind),
        f"{name}._target_={node._target_} must be a {kind.__module__}.{kind.__name__}",
    )
    return found


def _built_each(name: str, nodes: DictConfig, kind: type) -> dict[str, Any]:
    """Return the objects that a user has named, by their names and in the order of the config."""
    return {each: _built(f"{name}.{each}", node, kind) for each, node in named_items(nodes)}


def _build_module(algorithm: AlgorithmConfig) -> "partial[PolicyModule]":
    """Return the function that makes the module of an algorithm, after a check of its options."""
    make, target = build(algorithm.loss), algorithm.loss._target_
    require(
        isinstance(make, partial) and inspect.isclass(make.func) and issubclass(make.func, PolicyModule),
        f"algorithm.loss._target_={target} must be a subclass of {PolicyModule.__module__}.PolicyModule, "
        "with _partial_: true, as the run adds arguments",
    )
    missing = [name for name in make.func.required_options if name not in make.keywords]
    require(
        not missing, f"algorithm.loss lacks {', '.join(missing)}; {make.func.__name__} needs each of them"
    )
    with as_config_errors(target):
        make.func.check_options(**make.keywords)
    return cast("partial[PolicyModule]", make)


def build_environment_factory(cfg: Config) -> Callable[[], Environment] | None:
    """Return what makes environments, after it has made one.

    Raises:
        ConfigError: the target is no environment, or does not take its arguments.
    """
    if cfg.environment is None:
        return None
    factory = build(OmegaConf.create({**cfg.environment, "_partial_": True}))
    with as_config_errors("environment"):
        made = factory()
    require(
        isinstance(made, Environment),
        f"environment._target_={cfg.environment._target_} must be a lit_rlkv.environments.Environment",
    )
    return cast("Callable[[], Environment]", factory)


def _build_optimizer(name: str, node: DictConfig) -> Callable[[list[Any]], Optimizer]:
    """Return the function that makes an optimizer, after it has made one for a parameter without effect."""
    try:
        make = cast("Callable[[list[Any]], Optimizer]", build(node))
        make([torch.nn.Parameter(torch.zeros(1, 1))])
    except Exception as error:  # optimizers raise any type
        given = ", ".join(f"{key}={value}" for key, value in named_items(node))
        why = "one is of another type than it takes" if isinstance(error, TypeError) else error
        raise ConfigError(
            f"{name}: {node._target_} does not take {given}: {why}; change these options"
        ) from error
    return make


def build_reward_functions(cfg: RewardConfig) -> dict[str, RewardFunction]:
    """Build the reward functions of a config by name; no code of the user runs yet.

    Raises:
        ConfigError: a node names no reward function, or the weights and names cannot work.
    """
    functions: dict[str, RewardFunction] = _built_each("reward.functions", cfg.functions, RewardFunction)
    with as_config_errors("reward"):
        RewardRule(cfg, functions)
    return functions
