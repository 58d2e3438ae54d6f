"""Checks before a run that need its objects: classes of the right kind, and options that fit each other."""

import inspect
import logging

import torch
from hydra.utils import get_object
from lightning import Callback
from omegaconf import DictConfig

from lit_rlkv.callbacks.hooks import check_hooks
from lit_rlkv.config import Config, ConfigError, as_config_errors, build, check_targets, parse_config, require
from lit_rlkv.config.options import named_items
from lit_rlkv.config.schema import AlgorithmConfig
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.validation import check_answers, solutions_below_full_score
from lit_rlkv.experience.advantages import AdvantageEstimator, PairAdvantage
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.objectives.kl import MAX_ERROR
from lit_rlkv.reporting.progress import QUIET_S, track
from lit_rlkv.runs.context import RunContext, build_reward_functions, build_task, cache_of
from lit_rlkv.tasks import Task, UserTask
from lit_rlkv.tasks.rows import N_REPORTED

log = logging.getLogger(__name__)


def checked_config(cfg: DictConfig) -> Config:
    """Return a composed config as a `Config` whose objects can be built and fit each other.

    Raises:
        ConfigError: the first rule that is broken.
    """
    config = parse_config(cfg)
    check_targets(config.source)
    _check_extensions(config)
    for name, node in {"optimizer": config.optimizer, "sft.optimizer": config.sft.optimizer}.items():
        _check_optimizer(name, node)
    with as_config_errors("cache"):
        cache_of(config)  # its policy may be a class of the user's
    _check_algorithm(config)
    _check_reward(config)
    _check_roles(config)
    _check_reference_sync(config)
    _check_trained_weights(config)
    for node in (config.logger, config.distillation, *config.diagnostics.values()):
        if node is not None:
            build(node)  # constructors check their settings
    return config


def _check_optimizer(name: str, node: DictConfig) -> None:
    """Build the optimizer once, for a parameter without effect."""
    try:
        build(node)([torch.nn.Parameter(torch.zeros(1, 1))])
    except Exception as error:  # optimizers raise any type
        given = ", ".join(f"{key}={value}" for key, value in named_items(node))
        raise ConfigError(
            f"{name}: {node._target_} does not take {given}: {error}; change these options"
        ) from error


def _check_algorithm(cfg: Config) -> None:
    """Check the parts of an algorithm, alone and together."""
    algorithm = cfg.algorithm
    with as_config_errors("algorithm.advantage"):
        advantage: AdvantageEstimator = build(algorithm.advantage).for_task(build_task(cfg))
    has_judge = isinstance(advantage, PairAdvantage) and advantage.judge is not None
    require(
        not has_judge or cfg.reward.missing_eos_penalty == 0,
        f"reward.missing_eos_penalty={cfg.reward.missing_eos_penalty} has no effect beside a judge, who "
        "ranks in place of the reward; use 0",
    )
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
    has_critic = "value" in advantage.needs
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


def _check_reward(cfg: Config) -> None:
    build_reward_functions(cfg.reward)
    task = build_task(cfg)
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


def _check_reference_sync(cfg: Config) -> None:
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
        "reference" in needed_roles(cfg),
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


def check_shares(cfg: Config, n_ranks: int) -> None:
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
        is_pairwise = issubclass(get_object(cfg.algorithm.advantage._target_), PairAdvantage)
        _check_parts(
            cfg.algorithm,
            cfg.rollout.n_prompts // n_shards,
            is_pairwise=is_pairwise,
            of=f" of each of {n_shards} shards",
        )


def check_reward_functions(context: RunContext) -> None:
    """Score the worked solution of one problem with each reward function, to find its errors early.

    Warns of rows of a user's data whose solutions get less than full score.

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
    if context.fabric.is_global_zero and isinstance(context.task, UserTask):
        with track("score solution of row", len(context.task), quiet_s=QUIET_S) as advance:
            low = solutions_below_full_score(context.task, rewards, names, cfg.seed, on_progress=advance)
        for name, places in low.items():
            log.warning(
                "reward.functions.%s gives less than full score to the solutions of %d of %d rows, the first "
                "are %s; fix them or drop the rows, as responses like them are not rewarded",
                name,
                len(places),
                len(context.task),
                ", ".join(places[:N_REPORTED]),
            )


def _check_extensions(cfg: Config) -> None:
    """Refuse a task, algorithm, model preset or callback of the wrong kind."""
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
    task = build_task(cfg)
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


def needed_roles(cfg: Config) -> set[str]:
    """Return the roles that advantage, KL, reward, distillation and callbacks need beside the policy."""
    needed = set(build(cfg.algorithm.advantage).needs)
    if cfg.reward.learned != 0:
        needed.add("reward")
    if cfg.algorithm.kl.weight > 0:
        needed.add("reference")
    if cfg.distillation is not None:
        needed |= set(build(cfg.distillation).needs)
    for callback in build_user_callbacks(cfg):
        needed |= set(getattr(callback, "needs", ()))
    return needed
