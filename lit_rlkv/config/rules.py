"""Rules that settings must satisfy, each and with one another, said before any work."""

from collections.abc import Collection
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from lit_rlkv.checks import is_count, is_number
from lit_rlkv.config.algorithm_rules import check_algorithm
from lit_rlkv.config.building import ConfigError, build, check_targets, is_local, require
from lit_rlkv.config.extensions import check_extensions
from lit_rlkv.config.fabric_rules import check_fabric
from lit_rlkv.config.model_rules import check_precision, check_quantization
from lit_rlkv.config.presence import check_given
from lit_rlkv.config.rewards import build_reward
from lit_rlkv.config.training_rules import check_training
from lit_rlkv.kernels.backend import KERNELS
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.layouts import LAYOUTS

STAGES = ("sft", "rl", "eval")
WEIGHT_DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float32,
    "bf16-mixed": torch.float32,
}
"""Fabric's precisions, and what weights are stored in under each."""


def check_config(cfg: DictConfig) -> None:
    """Every rule that a run must satisfy, in the order in which a user would meet them.

    Raises:
        ConfigError: the first rule that is broken.
    """
    check_given(cfg)
    check_targets(cfg)
    check_extensions(cfg)
    for check in (
        _check_numbers,
        check_training,
        _check_stages,
        check_fabric,
        _check_paths,
        _check_cache,
        _check_sampling,
        check_algorithm,
        _check_reward,
        _check_roles,
        _check_records,
    ):
        check(cfg)
    check_precision(cfg)
    check_quantization(cfg)
    _check_arm(cfg)
    if cfg.distillation is not None:
        build(cfg.distillation)
    for diagnostic in cfg.diagnostics.values():
        if diagnostic is not None:
            build(diagnostic)


COUNTS = (
    "rollout.max_new_tokens",
    "rollout.n_prompts",
    "algorithm.group_size",
    "algorithm.n_iterations",
    "algorithm.n_epochs",
    "algorithm.n_minibatches",
    "algorithm.n_micro_batches",
    "roles.rank",
    "roles.alpha",
    "sft.n_steps",
    "sft.reward_steps",
    "sft.n_warmup_steps",
    "algorithm.n_warmup_steps",
    "algorithm.critic_warmup",
    "sft.batch_size",
    "sft.n_pairs",
    "sft.on_policy_pairs.n_prompts",
    "sft.on_policy_pairs.n_steps",
    "sft.steps_per_iteration",
    "evaluation.n_prompts",
    "evaluation.n_mismatch",
    "evaluation.batch_size",
    "callbacks.checkpoint_every",
    "callbacks.samples_every",
    "callbacks.n_samples",
    "callbacks.keep_last",
    "callbacks.keep_best",
)
MAY_BE_ZERO = (
    "callbacks.keep_best",
    "sft.on_policy_pairs.n_prompts",
    "sft.n_warmup_steps",
    "sft.n_pairs",
    "algorithm.n_warmup_steps",
    "algorithm.critic_warmup",
)
AMOUNTS = (
    "rollout.temperature",
    "algorithm.kl.weight",
    "algorithm.policy_weight",
    "evaluation.temperature",
    "optimizer.lr",
    "sft.optimizer.lr",
    "sft.reward_weight",
    "sft.on_policy_pairs.reward_weight",
    "reward.missing_eos_penalty",
    "reward.verifier",
    "reward.learned",
)


SWITCHES = (
    "roles.gradient_checkpointing",
    "roles.stack_passes",
    "algorithm.mask_truncated",
    "sft.joint",
)


def _check_numbers(cfg: DictConfig) -> None:
    for name in SWITCHES:
        value = OmegaConf.select(cfg, name)
        require(isinstance(value, bool), f"{name}={value} is neither true nor false; give one of them")
    for name in COUNTS:
        value = OmegaConf.select(cfg, name)
        least = 0 if name in MAY_BE_ZERO else 1
        require(
            is_count(value, least), f"{name}={value} is not a count; give a whole number of at least {least}"
        )
    for name in AMOUNTS:
        value = OmegaConf.select(cfg, name)
        require(is_number(value) and value >= 0, f"{name}={value} is not a number of at least 0; give one")


def _check_stages(cfg: DictConfig) -> None:
    given = cfg.stages
    example = given if isinstance(given, str) else ",".join(STAGES)
    require(OmegaConf.is_list(given), f"stages={given} is not a list; write stages=[{example}]")
    stages = list(cfg.stages)
    unknown = [stage for stage in stages if stage not in STAGES]
    require(
        not unknown,
        f"stages={stages}: unknown {', '.join(map(str, unknown))}; choose from {', '.join(STAGES)}",
    )
    require(len({*stages}) == len(stages), f"stages={stages} names a stage twice; name each once")
    require(bool(stages), f"stages={stages} leaves nothing to do; choose from {', '.join(STAGES)}")
    require(
        cfg.fabric.precision in WEIGHT_DTYPES,
        f"fabric.precision={cfg.fabric.precision!r} is unknown; choose one of {', '.join(WEIGHT_DTYPES)}",
    )
    _check_sft(cfg.sft)
    require(
        cfg.sft.on_policy_pairs.n_prompts == 0 or build(cfg.task).is_verifiable,
        f"sft.on_policy_pairs.n_prompts={cfg.sft.on_policy_pairs.n_prompts}: the task does not say which "
        "answers of the model are wrong, as preferences do not; use 0",
    )


def _check_sft(sft: DictConfig) -> None:
    names = ["n_steps", *([] if sft.joint else ["reward_steps"])]
    names += ["on_policy_pairs.n_steps"] if sft.on_policy_pairs.n_prompts > 0 else []
    for name in names:
        n_steps = OmegaConf.select(sft, name)
        require(
            n_steps % min(sft.steps_per_iteration, n_steps) == 0,
            f"sft.{name}={n_steps} is no multiple of sft.steps_per_iteration={sft.steps_per_iteration}; "
            "make it one",
        )
    require(
        sft.joint or sft.n_pairs > 0,
        "sft.joint=false trains a reward model of its own, but sft.n_pairs=0 gives it nothing to learn "
        "from; raise it, or use sft.joint=true",
    )
    require(
        sft.n_pairs <= sft.batch_size,
        f"sft.n_pairs={sft.n_pairs} is more than sft.batch_size={sft.batch_size}; lower it",
    )


def _check_paths(cfg: DictConfig) -> None:
    path = cfg.model.path
    if path is not None and is_local(path):
        require(
            (Path(path).expanduser() / "config.json").is_file(),
            f"model.path={path} is not a checkpoint folder (no config.json there); give a folder written by "
            "save_pretrained, or a hub name",
        )
    if path is None and not cfg.model.preset:
        raise ConfigError("model has neither path nor preset; give model.path=... or model=tiny")


def _check_cache(cfg: DictConfig) -> None:
    budgets = cfg.evaluation.budgets
    example = budgets if is_count(budgets) else 14
    require(
        OmegaConf.is_list(budgets),
        f"evaluation.budgets={budgets} is not a list; give a list, such as [{example}]",
    )
    try:
        CacheSpec(**cfg.cache)
        for budget in cfg.evaluation.budgets:
            CacheSpec(**{**cfg.cache, "budget": budget})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"cache: {error}") from error


def _check_sampling(cfg: DictConfig) -> None:
    rollout = cfg.rollout
    require(cfg.kernels in KERNELS, f"kernels={cfg.kernels!r} is unknown; choose one of {', '.join(KERNELS)}")
    require(
        rollout.cuda_graph is None or isinstance(rollout.cuda_graph, bool),
        f"rollout.cuda_graph={rollout.cuda_graph} is none of true, false and null; null captures on CUDA",
    )
    group_size, rows = cfg.algorithm.group_size, rollout.max_rows
    require(
        rows is None or is_count(rows, group_size),
        f"rollout.max_rows={rows} is no number of rows for the {group_size} responses to one prompt "
        f"(algorithm.group_size), which start together; give a whole number of at least {group_size}, or "
        "null for all",
    )
    rows = rollout.rows_per_pass
    require(
        rows is None or is_count(rows),
        f"rollout.rows_per_pass={rows} scores nothing; give a whole number of at least 1, or null for all",
    )
    for name, off in {"top_p": 1.0, "top_k": None}.items():
        require(
            rollout[name] == off,
            f"rollout.{name}={rollout[name]} cannot be replayed: the learner would have to renormalise over "
            "the very tokens that the sampler kept, which are not recorded; "
            f"use rollout.{name}={'null' if off is None else off}",
        )
    require(
        rollout.temperature > 0,
        f"rollout.temperature={rollout.temperature}: the policy gradient needs a distribution; "
        "give more than 0",
    )


def _check_reward(cfg: DictConfig) -> None:
    reward = build_reward(cfg.reward)
    task = build(cfg.task)
    require(
        reward.verifier == 0 or task.is_verifiable,
        f"reward.verifier={reward.verifier}: {type(task).__name__} does not say what is exactly right, as "
        "preferences do not, or answers without answer_after; use reward=learned, or reward.verifier=0 and "
        "reward.functions",
    )
    sft = cfg.sft
    require(
        reward.learned == 0 or "sft" not in cfg.stages or _trains_head(sft),
        f"reward.learned={reward.learned} needs a reward head, but sft.n_pairs={sft.n_pairs} with "
        f"sft.reward_weight={sft.reward_weight} trains none; raise them",
    )


def _trains_head(sft: DictConfig) -> bool:
    """True if the SFT stage trains a reward head."""
    on_pairs = sft.n_pairs > 0 and (sft.reward_weight > 0 or not sft.joint)
    return bool(on_pairs or (sft.on_policy_pairs.n_prompts > 0 and sft.on_policy_pairs.reward_weight > 0))


def _check_roles(cfg: DictConfig) -> None:
    roles = cfg.roles
    options: dict[str, Collection[str]] = {
        "layout": LAYOUTS,
        "value_init": ("reward", "zero"),
        "value_view": ("shadow", "dense"),
    }
    for name, known in options.items():
        require(
            roles[name] in known,
            f"roles.{name}={roles[name]!r} is unknown; choose one of {', '.join(known)}",
        )
    targets = roles.target_modules
    is_list = OmegaConf.is_list(targets) and targets and all(isinstance(name, str) for name in targets)
    require(
        isinstance(targets, str) or bool(is_list),
        f"roles.target_modules={targets} names no modules; give all-linear, or a list such as "
        "[q_proj,v_proj]",
    )
    has_critic = "value" in build(cfg.algorithm.advantage).needs
    require(
        not has_critic or roles.value_init == "zero" or "sft" not in cfg.stages or _trains_head(cfg.sft),
        "roles.value_init=reward starts the critic from the reward head, but sft trains none; use "
        "roles.value_init=zero, or raise sft.n_pairs and sft.reward_weight",
    )
    is_apart = "sft" in cfg.stages and not cfg.sft.joint
    uses_critic = cfg.reward.learned != 0 or has_critic
    require(
        not (is_apart and uses_critic and LAYOUTS[roles.layout].shares_critic),
        f"roles.layout={roles.layout} has one backbone for policy and critics, but sft.joint=false trains a "
        "reward model with weights of its own; use sft.joint=true, or roles=dynamic_lora",
    )


def _check_records(cfg: DictConfig) -> None:
    require(
        cfg.callbacks.best_mode in ("max", "min"),
        f"callbacks.best_mode={cfg.callbacks.best_mode!r} is unknown; choose max or min",
    )
    if cfg.logger is not None:
        build(cfg.logger)  # a logger's constructor looks at its settings and does nothing yet


def _check_arm(cfg: DictConfig) -> None:
    distillation = cfg.distillation
    is_dense = cfg.correction.samples_dense or cfg.cache.policy == "dense"
    require(
        distillation is None or distillation.weight == 0 or not is_dense,
        "distillation needs an evicting cache in the rollouts: with a dense one both tracks are the same; "
        "use distillation=none or distillation=anchor, or another correction and cache.policy",
    )
    require(
        cfg.algorithm.policy_weight > 0 or distillation is not None,
        "algorithm.policy_weight=0 leaves the policy nothing to learn from; raise it, or choose a "
        "distillation",
    )
