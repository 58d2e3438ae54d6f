"""What a config names, built once and checked: classes of the right kind, and objects that fit each other."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from lightning import Callback
from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer

from lit_rlkv.callbacks.diagnostic import Diagnostic
from lit_rlkv.callbacks.hooks import RLCallback, check_hooks
from lit_rlkv.config import Config, ConfigError, as_config_errors, build, check_targets, parse_config, require
from lit_rlkv.config.errors import one_line
from lit_rlkv.config.options import named_items
from lit_rlkv.config.schema import AlgorithmConfig, RewardConfig
from lit_rlkv.environments import Environment
from lit_rlkv.evaluation.evaluator import caches_to_evaluate
from lit_rlkv.experience.advantages import AdvantageEstimator, PairAdvantage
from lit_rlkv.experience.budget_control import BudgetController
from lit_rlkv.experience.reward import ENVIRONMENT, RewardRule, accuracy_component, rewarding
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.scorer import KVShape
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.models.layouts import CRITICS, LAYOUTS
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.objectives.corrections import Correction
from lit_rlkv.objectives.kl import MAX_ERROR
from lit_rlkv.reporting.progress import QUIET_S, ProgressMeter
from lit_rlkv.rewards import RewardFunction
from lit_rlkv.tasks import FiniteTask, Task
from lit_rlkv.tasks.json_rows import reading_progress


@dataclass(frozen=True)
class Parts:
    """The objects that a config names, each built once in a process."""

    task: Task
    environment_factory: Callable[[], Environment] | None
    """Makes the environment of one response; None: responses have one turn."""
    cache: CacheSpec
    """Of the config; a correction may sample rollouts with a dense one instead."""
    advantage: AdvantageEstimator
    correction: Correction
    optimizer: Callable[[list[Any]], Optimizer]
    sft_optimizer: Callable[[list[Any]], Optimizer]
    module: partial[PolicyModule]
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
    def accuracy(self) -> str | None:
        """Component of the reward by which responses count as correct; None if nothing says which are."""
        return accuracy_component(self.reward, self.parts.reward_functions, self.parts.task)

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
    """Parse a composed config, and `build_and_check` what it names."""
    return build_and_check(parse_config(cfg))


def build_and_check(config: Config) -> CheckedConfig:
    """Build what a config names, and check that the objects fit each other.

    Raises:
        ConfigError: the first rule that is broken.
    """
    check_targets(config.source)
    checked = CheckedConfig(**vars(config), parts=build_parts(config))
    with as_config_errors("evaluation.budgets"):
        caches_to_evaluate(checked.parts.cache, config.evaluation.budgets)
    _check_algorithm(checked)
    _check_budget_control(checked)
    _check_evictions(checked)
    _check_minibatches(checked)
    _check_verifier(checked)
    if "eval" in config.stages:
        check_accuracy(checked)
    _check_curriculum(checked)
    if "sft" in config.stages:  # otherwise the model exists, and is checked when the roles are made
        has_head, is_apart = config.sft.trains_reward_head, not config.sft.joint
        check_critics(checked, "the model of the SFT stage", has_head=has_head, is_apart=is_apart)
    _check_reference_sync(checked)
    _check_trained_weights(checked)
    return checked


def build_parts(cfg: Config) -> Parts:
    """Build the objects of a config; no code of the user runs but its constructors.

    Raises:
        ConfigError: an object cannot be built, or is of the wrong kind.
    """
    with as_config_errors("cache"):
        cache = CacheSpec.of(cfg.cache)
    user_callbacks = _built_each("user_callbacks", cfg.user_callbacks, Callback)
    with as_config_errors("user_callbacks"):
        check_hooks(user_callbacks.values())
    return Parts(
        task=build_task(cfg),
        environment_factory=build_environment_factory(cfg),
        cache=cache,
        advantage=_built("algorithm.advantage", cfg.algorithm.advantage, AdvantageEstimator),
        correction=build(cfg.correction),
        optimizer=_build_optimizer("optimizer", cfg.optimizer),
        sft_optimizer=_build_optimizer("sft.optimizer", cfg.sft.optimizer),
        module=_build_module(cfg.algorithm),
        reward_functions=build_reward_functions(cfg.reward),
        distillation=None if cfg.distillation is None else build(cfg.distillation),
        diagnostics=[build(node) for node in cfg.diagnostics.values() if node is not None],
        user_callbacks=[*user_callbacks.values()],
        logger=None if cfg.logger is None else build(cfg.logger),
    )


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


def build_task(cfg: Config) -> Task:
    """Build the task, and show the progress of reading its rows if that takes a while.

    Raises:
        ConfigError: the rows cannot be used, or the target is no task.
    """
    meter = ProgressMeter("% of rows read", quiet_s=QUIET_S)
    meter.start(0, 100)
    try:
        with reading_progress(lambda n_done, n_total: meter.show(100 * n_done / n_total, 100, {})):
            return cast(Task, _built("task", cfg.task, Task))
    finally:
        meter.stop()


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
        raise ConfigError(
            f"{name}: {node._target_} does not take {given}: {error}; change these options"
        ) from error
    return make


def try_optimizers(cfg: CheckedConfig, device: torch.device) -> None:
    """Take a step of each optimizer on small parameters of the kinds that it will train.

    Raises:
        ConfigError: it cannot.
    """
    matrix, vector = torch.zeros(4, 4), torch.zeros(4)
    learned = [matrix, *([vector] if LAYOUTS[cfg.roles.layout].trains_backbones else [])]
    if cfg.parts.has_critic:
        learned += ScalarHead(4).parameters()
    if (policy := cfg.parts.cache.make_policy()) is not None and policy.is_trained:
        learned += policy.make_scorer([KVShape(2, 4, 4)]).parameters()
    stages = {
        "sft": ("sft.optimizer", cfg.sft.optimizer, cfg.parts.sft_optimizer, [matrix, vector]),
        "rl": ("optimizer", cfg.optimizer, cfg.parts.optimizer, learned),
    }
    for name, node, make, kinds in [stages[stage] for stage in cfg.stages if stage in stages]:
        parameters = [torch.nn.Parameter(kind.detach().clone().to(device)) for kind in kinds]
        try:
            optimizer = make([{"params": parameters}])
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        except Exception as error:  # optimizers raise any type
            sizes = sorted({kind.ndim for kind in kinds})
            raise ConfigError(
                f"{name}._target_={node._target_} must train parameters of {' and '.join(map(str, sizes))} "
                f"dimensions, by dense gradients and without a closure, and its first step fails: "
                f"{one_line(error) or type(error).__name__}; use another, such as torch.optim.AdamW"
            ) from error


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
    module = cast("type[PolicyModule]", cfg.parts.module.func)
    require(
        isinstance(advantage, module.advantage_estimator),
        f"algorithm.advantage: {module.__name__} learns from {module.advantage_estimator.__name__}, not from "
        f"{type(advantage).__name__}; choose an algorithm and change its options",
    )
    kl, n_rows = algorithm.kl, cfg.rollout.n_prompts * algorithm.group_size
    require(
        kl.target is None or kl.horizon > MAX_ERROR * n_rows,
        f"algorithm.kl.horizon={kl.horizon} steers too fast for {n_rows} responses an iteration; give "
        f"more than {MAX_ERROR * n_rows:.0f}",
    )
    require(
        kl.place == "loss" or not isinstance(advantage, PairAdvantage),
        "algorithm.kl.place=reward has no meaning for preference pairs, whose loss pulls to the reference by "
        "beta; use place=loss or weight=0",
    )
    require(
        algorithm.critic_warmup < (algorithm.n_iterations if cfg.parts.has_critic else 1),
        f"algorithm.critic_warmup={algorithm.critic_warmup}: give 0 without a critic, and fewer than "
        f"n_iterations={algorithm.n_iterations} with one",
    )


def _check_budget_control(cfg: CheckedConfig) -> None:
    target = cfg.cache.target_overlap
    with as_config_errors("cache"):
        BudgetController(cfg.parts.cache, target, cfg.cache.budget_bounds)
    is_measured = dict(named_items(cfg.diagnostics)).get("mismatch") is not None
    require(
        target is None
        or (is_measured and not cfg.parts.correction.samples_dense and not cfg.parts.cache.is_dense),
        f"cache.target_overlap={target} needs an evicting cache in the rollouts, and diagnostics.mismatch, "
        "which measures the overlap; set it to null, or choose others",
    )


def _check_evictions(cfg: CheckedConfig) -> None:
    """Check that a trained eviction policy can be trained, and that without one the tokens' policy is."""
    eviction, cache, correction = cfg.algorithm.eviction, cfg.parts.cache, cfg.parts.correction
    trains_evictions = cache.is_trained and eviction.weight > 0
    require(
        cfg.algorithm.policy_weight > 0 or cfg.distillation is not None or trains_evictions,
        "algorithm.policy_weight=0 leaves the policy nothing to learn from; raise it, or choose a "
        "distillation, or cache.policy=learned, which trains its evictions alone",
    )
    require(
        not trains_evictions or (correction.replays and not correction.samples_dense),
        f"algorithm.eviction.weight={eviction.weight} learns from evictions that the learner replays, and "
        "this correction has none; use correction=shadow, or algorithm.eviction.weight=0",
    )
    if trains_evictions:
        with as_config_errors("cache"):
            cache.check_draws()
    require(
        not cache.is_trained or cfg.sft.on_policy_pairs.n_prompts == 0,
        f"sft.on_policy_pairs.n_prompts={cfg.sft.on_policy_pairs.n_prompts} samples under cache.policy="
        f"{cache.policy_name}, whose scorer is made after SFT; use 0, or another policy",
    )


def _check_minibatches(cfg: CheckedConfig, n_shards: int = 1) -> None:
    """Check that the responses or pairs of each shard suffice for the minibatches."""
    is_pairwise = isinstance(cfg.parts.advantage, PairAdvantage)
    n_prompts, n_minibatches = cfg.rollout.n_prompts // n_shards, cfg.algorithm.n_minibatches
    n_units = n_prompts if is_pairwise else n_prompts * cfg.algorithm.group_size
    require(
        n_minibatches <= n_units,
        f"algorithm.n_minibatches={n_minibatches} cannot be cut from {n_units} "
        f"{'pairs' if is_pairwise else 'responses'}{f' of each of {n_shards} shards' if n_shards > 1 else ''}"
        "; lower it, or raise rollout.n_prompts",
    )


def _check_verifier(cfg: CheckedConfig) -> None:
    task = cfg.parts.task
    settings = {
        "sft.on_policy_pairs.n_prompts": cfg.sft.on_policy_pairs.n_prompts,
        "reward.verifier": cfg.reward.verifier,
    }
    for name, value in settings.items():
        require(
            value == 0 or task.is_verifiable,
            f"{name}={value}: {type(task).__name__} cannot verify answers, as with preferences, or answers "
            f"without answer_after; use {name}=0, as reward=learned and reward.functions need no verifier",
        )
    require(
        cfg.sft.on_policy_pairs.n_prompts == 0 or cfg.environment is None,
        f"sft.on_policy_pairs.n_prompts={cfg.sft.on_policy_pairs.n_prompts} pairs solutions with wrong "
        "answers of one turn, and with an environment there are several; use 0, or environment=none",
    )
    require(
        cfg.reward.environment == 0 or cfg.environment is not None,
        f"reward.environment={cfg.reward.environment} needs an environment; choose one, or use 0",
    )
    require(
        cfg.reward.accuracy != ENVIRONMENT or cfg.environment is not None,
        f"reward.accuracy={ENVIRONMENT} needs an environment; choose one, or use null",
    )


def check_accuracy(cfg: CheckedConfig) -> None:
    """Raise a ConfigError if an evaluation would have to choose between reward functions."""
    names = rewarding(cfg.parts.reward_functions)
    require(
        cfg.accuracy is not None or len(names) < 2,
        f"reward.accuracy=null: {cfg.parts.task} verifies no answers, so evaluations must know by which of "
        f"{', '.join(names)} a response is correct; set reward.accuracy={''.join(names[:1])}",
    )


def _check_curriculum(cfg: CheckedConfig) -> None:
    """Check that problems return, and that their responses have a success."""
    decay, task = cfg.algorithm.curriculum.decay, cfg.parts.task
    if decay is None:
        return
    require(
        isinstance(task, FiniteTask),
        f"algorithm.curriculum.decay={decay} draws problems by their earlier success, and {task} makes each "
        "problem anew; use a dataset, such as task=jsonl, or null",
    )
    require(
        cfg.accuracy is not None,
        f"algorithm.curriculum.decay={decay} needs the success of a response, and {task} cannot verify "
        "answers; set reward.accuracy to a function that can, or use null",
    )


def check_critics(cfg: CheckedConfig, start: str, *, has_head: bool, is_apart: bool) -> None:
    """Check that the model that RL starts from has what the critics of the run need.

    Args:
        start: the model, for errors.
        has_head: True if it has a reward head.
        is_apart: True if its reward model has weights of its own.

    Raises:
        ConfigError: it lacks something.
    """
    settings, critics = cfg.roles, cfg.needed_roles & set(CRITICS)
    require(
        "value" not in critics or settings.value_init == "zero" or has_head,
        f"roles.value_init=reward starts the critic from the reward head, and {start} has none; use "
        "roles.value_init=zero, or train on preference pairs (stages=[sft,...], sft.n_pairs, "
        "sft.reward_weight)",
    )
    require(
        not (is_apart and critics and LAYOUTS[settings.layout].shares_critic),
        f"roles.layout={settings.layout} has one backbone for policy and critics, but {start} has a reward "
        "model with weights of its own; use roles=dynamic_lora, or train with sft.joint=true",
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
        trainers[f"roles=full (roles.layout={cfg.roles.layout})"] = "roles=hydra or so"
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
    shared = {
        "rollout.n_shards": (n_shards, n_ranks),
        "rollout.n_prompts": (cfg.rollout.n_prompts, n_shards),
    }
    if "sft" in cfg.stages:
        shared |= {"sft.batch_size": (cfg.sft.batch_size, n_ranks), "sft.n_pairs": (cfg.sft.n_pairs, n_ranks)}
    for name, (value, n_parts) in shared.items():
        require(
            value % n_parts == 0,
            f"{name}={value} cannot be divided evenly over {n_parts} "
            f"{'shards' if name == 'rollout.n_prompts' else 'processes'}; give a multiple of {n_parts}",
        )
    _check_minibatches(cfg, n_shards)


def build_reward_functions(cfg: RewardConfig) -> dict[str, RewardFunction]:
    """Build the reward functions of a config by name; no code of the user runs yet.

    Raises:
        ConfigError: a node names no reward function, or the weights and names cannot work.
    """
    functions: dict[str, RewardFunction] = _built_each("reward.functions", cfg.functions, RewardFunction)
    with as_config_errors("reward"):
        RewardRule(cfg, functions)
    return functions
