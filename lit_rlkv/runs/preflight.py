"""Checks before a run that need its objects: classes of the right kind, and options that fit each other."""

import inspect
from collections.abc import Iterator

import torch
from hydra.utils import get_object
from lightning import Callback
from omegaconf import DictConfig

from lit_rlkv.callbacks.hooks import check_hooks
from lit_rlkv.config import Config, ConfigError, as_config_errors, build, check_targets, parse_config, require
from lit_rlkv.config.options import named_items
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.validation import check_answers
from lit_rlkv.experience.advantages import AdvantageEstimator
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.runs.algorithm_checks import check_algorithm
from lit_rlkv.runs.context import RunContext, build_reward_functions, cache_of
from lit_rlkv.tasks import Task


def checked_config(cfg: DictConfig) -> Config:
    """Return a composed config as a `Config` that a run can start from.

    Raises:
        ConfigError: the first rule that is broken.
    """
    config = parse_config(cfg)
    check_config(config)
    return config


def check_config(cfg: Config) -> None:
    """Check that every object of a config can be built, and that they fit each other.

    Raises:
        ConfigError: the first rule that is broken.
    """
    check_targets(cfg.source)
    check_extensions(cfg)
    for name, node in {"optimizer": cfg.optimizer, "sft.optimizer": cfg.sft.optimizer}.items():
        _check_optimizer(name, node)
    _check_cache(cfg)
    check_algorithm(cfg)
    _check_reward(cfg)
    _check_roles(cfg)
    _check_trained_weights(cfg)
    for node in (cfg.logger, cfg.distillation, *cfg.diagnostics.values()):
        if node is not None:
            build(node)  # constructors check their settings


def _check_optimizer(name: str, node: DictConfig) -> None:
    """Build the optimizer once, for a parameter without effect."""
    try:
        build(node)([torch.nn.Parameter(torch.zeros(1, 1))])
    except Exception as error:  # optimizers raise any type
        given = ", ".join(f"{key}={value}" for key, value in named_items(node))
        raise ConfigError(
            f"{name}: {node._target_} does not take {given}: {error}; change these options"
        ) from error


def _check_cache(cfg: Config) -> None:
    with as_config_errors("cache"):
        cache = cache_of(cfg)
        for budget in cfg.evaluation.budgets:
            CacheSpec(cache.policy, budget, cache.interval, cache.sink, cache.window, cache.policy_options)


def _check_reward(cfg: Config) -> None:
    build_reward_functions(cfg.reward)
    task = build(cfg.task)
    require(
        cfg.sft.on_policy_pairs.n_prompts == 0 or task.is_verifiable,
        f"sft.on_policy_pairs.n_prompts={cfg.sft.on_policy_pairs.n_prompts}: the task must be able to verify "
        "answers, which preferences cannot; use 0",
    )
    require(
        cfg.reward.verifier == 0 or task.is_verifiable,
        f"reward.verifier={cfg.reward.verifier}: {type(task).__name__} cannot verify answers, as with "
        "preferences, or answers without answer_after; use reward=learned, or reward.verifier=0 and "
        "reward.functions",
    )


def _check_roles(cfg: Config) -> None:
    has_critic = "value" in build(cfg.algorithm.advantage).needs
    trains_head = cfg.sft.trains_reward_head
    require(
        not has_critic or cfg.roles.value_init == "zero" or "sft" not in cfg.stages or trains_head,
        "roles.value_init=reward starts the critic from the reward head, but sft trains none; use "
        "roles.value_init=zero, or raise sft.n_pairs and sft.reward_weight",
    )
    is_apart = "sft" in cfg.stages and not cfg.sft.joint
    uses_critic = cfg.reward.learned != 0 or has_critic
    require(
        not (is_apart and uses_critic and LAYOUTS[cfg.roles.layout].shares_critic),
        f"roles.layout={cfg.roles.layout} has one backbone for policy and critics, but sft.joint=false "
        "trains a reward model with weights of its own; use sft.joint=true, or roles=dynamic_lora",
    )


def _check_trained_weights(cfg: Config) -> None:
    """Refuse quantized or bfloat16 weights that must learn: a small update is rounded away."""
    fabric = cfg.fabric
    for who, instead in _trainers_of_weights(cfg):
        require(
            fabric.precision != "bf16-true",
            f"fabric.precision=bf16-true rounds small updates of the weights that {who} trains away; use "
            f"fabric.precision=bf16-mixed, or {instead}",
        )
        require(
            fabric.quantization is None,
            f"fabric.quantization={fabric.quantization}, but {who} trains all weights; use {instead}, or "
            "null",
        )


def _trainers_of_weights(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the settings that train the backbone's own weights, each with an alternative."""
    if "sft" in cfg.stages:
        yield "sft", "stages=[rl,eval]"
    if LAYOUTS[cfg.roles.layout].trains_backbones:
        yield f"roles={cfg.roles.layout}", "roles=hydra or so"


def check_reward_functions(context: RunContext) -> None:
    """Score the worked solution of one problem with each reward function, to find its errors early.

    Raises:
        ConfigError: a function cannot score a row of the task, or does not return a number.
    """
    cfg, rewards = context.cfg, context.rewards
    with as_config_errors("task"):
        check_answers(context.task, rewards.functions, cfg.seed)
        problems = PromptSource(context.task, split="train", seed=cfg.seed).take(1)
    names = [name for name in rewards.functions if "rl" in cfg.stages or name == cfg.reward.accuracy]
    with as_config_errors("reward.functions"):
        answers = rewards.ask(problems, [problem.solution for problem in problems], names).collect(
            warns=False
        )
    for name, error in answers.errors.items():
        rewards.close()
        raise ConfigError(
            f"reward.functions.{name} has no score for a worked solution of {context.task}: {error}"
        )


def check_extensions(cfg: Config) -> None:
    """Refuse a task, algorithm, model preset or callback of the wrong kind.

    Raises:
        ConfigError: naming the key and the class that is needed.
    """
    _check_class("algorithm.advantage", cfg.algorithm.advantage, AdvantageEstimator)
    _check_class("algorithm.loss", cfg.algorithm.loss, PolicyModule)
    for name, node in {"algorithm.loss": cfg.algorithm.loss, "model.preset": cfg.model.preset}.items():
        require(
            not node or bool(node.get("_partial_")),
            f"{name} must have _partial_: true, as the run adds arguments; add +{name}._partial_=true",
        )
    task = build(cfg.task)
    missing = [name for name in ("is_verifiable", "sample", "score", "corrupt") if not hasattr(task, name)]
    require(
        isinstance(task, Task),
        f"task._target_={cfg.task._target_} must be a task, and has no {', '.join(missing)}; see "
        "lit_rlkv.tasks.Task",
    )
    build_user_callbacks(cfg)


def build_user_callbacks(cfg: Config) -> list[Callback]:
    """Build the callbacks under `user_callbacks`, in the order of the config.

    Raises:
        ConfigError: a node names no callback, or a callback has a hook that is never called.
    """
    callbacks = []
    for name, node in named_items(cfg.user_callbacks):
        where = f"user_callbacks.{name}"
        if not isinstance(node, DictConfig) or "_target_" not in node:
            raise ConfigError(
                f"{where}={node} must name a callback; give {where}._target_=mypackage.callbacks.MyCallback"
            )
        callbacks.append(build(node))
        with as_config_errors(where):
            check_hooks(callbacks[-1:])
    return callbacks


def _check_class(where: str, node: DictConfig, kind: type) -> None:
    """Refuse a target that is not a class of this kind."""
    found = get_object(node._target_)
    require(
        inspect.isclass(found) and issubclass(found, kind),
        f"{where}._target_={node._target_} must be a subclass of {kind.__module__}.{kind.__name__}",
    )
