"""What a config names, built once and checked: classes of the right kind, and objects that fit each other."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from hydra.utils import get_object
from lightning import Callback
from omegaconf import DictConfig
from torch.optim import Optimizer

from lit_rlkv.callbacks.diagnostic import Diagnostic
from lit_rlkv.callbacks.hooks import RLCallback, check_hooks
from lit_rlkv.config import Config, ConfigError, as_config_errors, build, check_targets, parse_config, require
from lit_rlkv.config.options import named_items
from lit_rlkv.config.schema import AlgorithmConfig, RewardConfig
from lit_rlkv.experience.advantages import AdvantageEstimator, PairAdvantage
from lit_rlkv.experience.reward import RewardRule
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.objectives.corrections import Correction
from lit_rlkv.objectives.kl import MAX_ERROR
from lit_rlkv.reporting.progress import QUIET_S, ProgressMeter
from lit_rlkv.rewards import RewardFunction
from lit_rlkv.tasks import Task
from lit_rlkv.tasks.json_rows import reading_progress


@dataclass(frozen=True)
class Parts:
    """The objects that a config names, each built once in a process."""

    task: Task
    cache: CacheSpec
    """Of the config; a correction may sample rollouts with a dense one instead."""
    advantage: AdvantageEstimator
    correction: Correction
    optimizer: Callable[[list[Any]], Optimizer]
    sft_optimizer: Callable[[list[Any]], Optimizer]
    module: Callable[..., PolicyModule]
    """Makes the module of the algorithm from roles and an optimizer."""
    reward_functions: dict[str, RewardFunction]
    distillation: RLCallback | None
    diagnostics: list[Diagnostic]
    user_callbacks: list[Callback]
    logger: Any
    """A logger, or the function that makes one of Lightning's; None without any."""

    @property
    def has_critic(self) -> bool:
        return "value" in self.advantage.needs


@dataclass(frozen=True)
class CheckedConfig(Config):
    """A config with the objects that it names, which fit each other."""

    parts: Parts = field(kw_only=True, repr=False, compare=False)

    @property
    def needed_roles(self) -> set[str]:
        """Roles that advantage, KL, reward, distillation and callbacks need beside the policy."""
        needed = set(self.parts.advantage.needs)
        if self.reward.learned != 0:
            needed.add("reward")
        if self.algorithm.kl.weight > 0:
            needed.add("reference")
        for callback in (self.parts.distillation, *self.parts.user_callbacks):
            needed |= set(getattr(callback, "needs", ()))
        return needed


def checked_config(cfg: DictConfig) -> CheckedConfig:
    """Build what a composed config names, and check that the objects fit each other.

    Raises:
        ConfigError: the first rule that is broken.
    """
    config = parse_config(cfg)
    check_targets(config.source)
    checked = CheckedConfig(**vars(config), parts=build_parts(config))
    _check_algorithm(checked)
    _check_reward(checked)
    _check_roles(checked)
    _check_reference_sync(checked)
    _check_trained_weights(checked)
    return checked


def build_parts(cfg: Config) -> Parts:
    """Build the objects of a config; no code of the user runs but its constructors.

    Raises:
        ConfigError: an object cannot be built, or is of the wrong kind.
    """
    _check_kinds(cfg)
    task = build_task(cfg)
    callbacks = build_user_callbacks(cfg)
    make_optimizer = _build_optimizer("optimizer", cfg.optimizer)
    make_sft_optimizer = _build_optimizer("sft.optimizer", cfg.sft.optimizer)
    with as_config_errors("cache"):
        cache = CacheSpec(**cfg.cache.spec)
    return Parts(
        task=task,
        cache=cache,
        advantage=build(cfg.algorithm.advantage),
        correction=build(cfg.correction),
        optimizer=make_optimizer,
        sft_optimizer=make_sft_optimizer,
        module=build(cfg.algorithm.loss),
        reward_functions=build_reward_functions(cfg.reward),
        distillation=None if cfg.distillation is None else build(cfg.distillation),
        diagnostics=[build(node) for node in cfg.diagnostics.values() if node is not None],
        user_callbacks=callbacks,
        logger=None if cfg.logger is None else build(cfg.logger),
    )


def build_task(cfg: Config) -> Task:
    """Build the task, and show the progress of reading its rows if that takes a while.

    Raises:
        ConfigError: the rows cannot be used, or the target is no task.
    """
    meter = ProgressMeter("% of rows read", quiet_s=QUIET_S)
    meter.start(0, 100)
    try:
        with reading_progress(lambda n_done, n_total: meter.show(100 * n_done / n_total, 100, {})):
            task = build(cfg.task)
    finally:
        meter.stop()
    require(isinstance(task, Task), f"task._target_={cfg.task._target_} must be a lit_rlkv.tasks.Task")
    return cast(Task, task)


def _build_optimizer(name: str, node: DictConfig) -> Callable[[list[Any]], Optimizer]:
    """Return the function that makes an optimizer, after it has made one for a parameter without effect."""
    try:
        make = cast("Callable[[list[Any]], Optimizer]", build(node))
        make([torch.nn.Parameter(torch.zeros(1, 1))])
    except Exception as error:  # optimizers raise any type
        given = ", ".join(f"{key}={value}" for key, value in named_items(node))
        raise ConfigError(
            f"{name}: {node._target_} does not take {given}: {error}; change these options"
        ) from error
    return make


def _check_algorithm(cfg: CheckedConfig) -> None:
    """Check the parts of an algorithm, alone and together."""
    algorithm = cfg.algorithm
    with as_config_errors("algorithm.advantage"):
        advantage = cfg.parts.advantage.for_task(cfg.parts.task)
    require(
        algorithm.group_size >= advantage.min_group_size,
        f"algorithm.group_size={algorithm.group_size}: {type(advantage).__name__} compares responses to one "
        f"prompt; give at least {advantage.min_group_size}",
    )
    _check_loss(algorithm, advantage)
    is_pairwise = isinstance(advantage, PairAdvantage)
    _check_parts(algorithm, cfg.rollout.n_prompts, is_pairwise=is_pairwise)
    kl, n_rows = algorithm.kl, cfg.rollout.n_prompts * algorithm.group_size
    require(
        kl.target is None or kl.horizon > MAX_ERROR * n_rows,
        f"algorithm.kl.horizon={kl.horizon} steers too fast for {n_rows} responses an iteration; give "
        f"more than {MAX_ERROR * n_rows:.0f}",
    )
    require(
        kl.place == "loss" or not is_pairwise,
        "algorithm.kl.place=reward has no meaning for preference pairs, whose loss pulls to the reference by "
        "beta; use place=loss or weight=0",
    )
    has_critic = cfg.parts.has_critic
    require(
        0 <= algorithm.critic_warmup < algorithm.n_iterations
        and (has_critic or algorithm.critic_warmup == 0),
        f"algorithm.critic_warmup={algorithm.critic_warmup}: give 0 without a critic, and fewer than "
        f"n_iterations={algorithm.n_iterations} with one",
    )


def _check_loss(algorithm: AlgorithmConfig, advantage: AdvantageEstimator) -> None:
    module = get_object(algorithm.loss._target_)
    require(
        isinstance(advantage, module.advantage_estimator),
        f"algorithm.advantage: {module.__name__} learns from {module.advantage_estimator.__name__}, not from "
        f"{type(advantage).__name__}; choose an algorithm and change its options",
    )
    missing = [name for name in module.required_options if name not in algorithm.loss]
    require(not missing, f"algorithm.loss lacks {', '.join(missing)}; {module.__name__} needs each of them")
    with as_config_errors(algorithm.loss._target_):
        module.check_options(**dict(named_items(algorithm.loss)))


def _check_parts(algorithm: AlgorithmConfig, n_prompts: int, *, is_pairwise: bool, of: str = "") -> None:
    """Check that the responses or pairs to `n_prompts` prompts fill the parts of an iteration."""
    n_parts = algorithm.n_minibatches
    n_units = n_prompts * (1 if is_pairwise else algorithm.group_size)
    require(
        1 <= n_parts <= n_units,
        f"algorithm.n_minibatches={n_parts} cannot be cut from {n_units} "
        f"{'pairs' if is_pairwise else 'responses'}{of}; lower it, or raise rollout.n_prompts",
    )


def _check_reward(cfg: CheckedConfig) -> None:
    task = cfg.parts.task
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


def _check_roles(cfg: CheckedConfig) -> None:
    has_critic, trains_head = cfg.parts.has_critic, cfg.sft.trains_reward_head
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


def _check_reference_sync(cfg: CheckedConfig) -> None:
    every, layout = cfg.algorithm.reference_sync.every, cfg.roles.layout
    if every is None:
        return
    require(
        LAYOUTS[layout].trains_backbones,
        f"algorithm.reference_sync.every={every} needs a policy with weights of its own to mix into the "
        f"reference, but roles.layout={layout} trains an adapter; use roles=full, or "
        "algorithm.reference_sync.every=null",
    )
    require(
        "reference" in cfg.needed_roles,
        f"algorithm.reference_sync.every={every}, but nothing reads the reference: algorithm.kl.weight=0, "
        "and no distillation is from it; raise the weight, or use algorithm.reference_sync.every=null",
    )


def _check_trained_weights(cfg: Config) -> None:
    """Refuse quantized or bfloat16 weights that must learn: a small update is rounded away."""
    fabric = cfg.fabric
    trainers = {"sft": "stages=[rl,eval]"} if "sft" in cfg.stages else {}
    if LAYOUTS[cfg.roles.layout].trains_backbones:
        trainers[f"roles.layout={cfg.roles.layout}"] = "roles=hydra or so"
    for who, instead in trainers.items():
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


def check_shares(cfg: CheckedConfig, n_ranks: int) -> None:
    """Check that prompts and rows of the SFT stage can be divided evenly among the ranks.

    Raises:
        ConfigError: they cannot; ranks with less work would wait for the others.
    """
    n_shards = cfg.rollout.n_shards or n_ranks
    require(
        n_shards % n_ranks == 0,
        f"rollout.n_shards={n_shards} cannot be divided evenly over {n_ranks} processes; give a multiple of "
        "it, or null",
    )
    shared = {"rollout.n_prompts": (cfg.rollout.n_prompts, n_shards)}
    if "sft" in cfg.stages:
        shared |= {"sft.batch_size": (cfg.sft.batch_size, n_ranks), "sft.n_pairs": (cfg.sft.n_pairs, n_ranks)}
    for name, (value, n_parts) in shared.items():
        require(
            value % n_parts == 0,
            f"{name}={value} cannot be divided evenly over {n_parts} "
            f"{'shards' if n_parts == n_shards else 'processes'}; give a multiple of {n_parts}",
        )
    if n_shards > 1:
        is_pairwise = isinstance(cfg.parts.advantage, PairAdvantage)
        _check_parts(
            cfg.algorithm,
            cfg.rollout.n_prompts // n_shards,
            is_pairwise=is_pairwise,
            of=f" of each of {n_shards} shards",
        )


def _check_kinds(cfg: Config) -> None:
    """Refuse an algorithm or model preset of the wrong kind."""
    kinds: dict[str, type] = {"advantage": AdvantageEstimator, "loss": PolicyModule}
    for part, kind in kinds.items():
        target = getattr(cfg.algorithm, part)._target_
        found = get_object(target)
        require(
            inspect.isclass(found) and issubclass(found, kind),
            f"algorithm.{part}._target_={target} must be a subclass of {kind.__module__}.{kind.__name__}",
        )
    for name, node in {"algorithm.loss": cfg.algorithm.loss, "model.preset": cfg.model.preset}.items():
        require(
            not node or bool(node.get("_partial_")),
            f"{name} must have _partial_: true, as the run adds arguments; add +{name}._partial_=true",
        )


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


def build_reward_functions(cfg: RewardConfig) -> dict[str, RewardFunction]:
    """Build the reward functions of a config by name; no code of the user runs yet.

    Raises:
        ConfigError: a node names no reward function, or the weights and names cannot work.
    """
    functions = {}
    for name, node in named_items(cfg.functions):
        where = f"reward.functions.{name}"
        require(
            isinstance(node, DictConfig) and "_target_" in node,
            f"{where} must name a reward function, got {node}; give {where}._target_, such as "
            "lit_rlkv.rewards.Numeric",
        )
        try:
            functions[name] = build(node)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        require(
            isinstance(functions[name], RewardFunction),
            f"{where}._target_ must be a reward function, got {node._target_}; choose one of "
            "lit_rlkv.rewards",
        )
    with as_config_errors("reward"):
        RewardRule(cfg, functions)
    return functions
