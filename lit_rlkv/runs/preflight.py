"""A config with the objects that it names, which fit each other and the settings."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from omegaconf import DictConfig

from lit_rlkv.config import Config, ConfigError, as_config_errors, check_targets, parse_config, require
from lit_rlkv.config.options import named_items
from lit_rlkv.evaluation.evaluator import caches_to_evaluate
from lit_rlkv.experience.budget_control import BudgetController
from lit_rlkv.experience.kl_control import KLController
from lit_rlkv.experience.minibatches import check_minibatches
from lit_rlkv.experience.reward import RewardRule, accuracy_component, check_verifiable, rewarding
from lit_rlkv.models.layouts import CRITICS, LAYOUTS
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.planning.models import needed_roles
from lit_rlkv.runs.parts import Parts
from lit_rlkv.tasks import FiniteTask


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
        return needed_roles(self, self.parts.advantage, [self.parts.distillation, *self.parts.user_callbacks])


@contextmanager
def as_refusals() -> Iterator[None]:
    """Raise the ValueErrors of checks, which name the keys, as ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def checked_config(cfg: DictConfig) -> CheckedConfig:
    """Parse a composed config, and `build_and_check` what it names."""
    return build_and_check(parse_config(cfg))


def build_and_check(config: Config) -> CheckedConfig:
    """Build what a config names, and check that the objects fit each other.

    Raises:
        ConfigError: the first rule that is broken.
    """
    check_targets(config.source)
    checked = CheckedConfig(**vars(config), parts=Parts(config))
    with as_config_errors("evaluation.budgets"):
        caches_to_evaluate(checked.parts.cache, config.evaluation.budgets)
    _check_algorithm(checked)
    _check_budget_control(checked)
    _check_evictions(checked)
    _check_rewards(checked)
    if "eval" in config.stages:
        check_accuracy(checked)
    _check_curriculum(checked)
    if "sft" in config.stages:  # otherwise the model exists, and is checked when the roles are made
        has_head, is_apart = config.sft.trains_reward_head, not config.sft.joint
        check_critics(checked, "the model of the SFT stage", has_head=has_head, is_apart=is_apart)
    _check_reference_sync(checked)
    _check_trained_weights(checked)
    return checked


def _check_algorithm(cfg: CheckedConfig) -> None:
    """Check the parts of an algorithm, alone and together."""
    algorithm, n_prompts, advantage = cfg.algorithm, cfg.rollout.n_prompts, cfg.parts.advantage
    module = cast("type[PolicyModule]", cfg.parts.module.func)
    require(
        isinstance(advantage, module.advantage_estimator),
        f"algorithm.advantage: {module.__name__} learns from {module.advantage_estimator.__name__}, not from "
        f"{type(advantage).__name__}; choose an algorithm and change its options",
    )
    with as_refusals():
        advantage.check(algorithm)
        KLController(algorithm.kl, n_prompts * algorithm.group_size)
        check_minibatches(advantage, algorithm, n_prompts)


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
        cache.is_trained or cfg.sft.eviction_steps == 0,
        f"sft.eviction_steps={cfg.sft.eviction_steps} trains the scorer of evictions, and cache.policy="
        f"{cache.policy_name} has none; use 0, or cache.policy=learned",
    )
    require(
        not cache.is_trained or cfg.sft.on_policy_pairs.n_prompts == 0,
        f"sft.on_policy_pairs.n_prompts={cfg.sft.on_policy_pairs.n_prompts} samples under cache.policy="
        f"{cache.policy_name}, whose scorer is made after SFT; use 0, or another policy",
    )


def _check_rewards(cfg: CheckedConfig) -> None:
    """Check that the task and an environment can give the rewards, and wrong answers of the model."""
    task, has_environment = cfg.parts.task, cfg.environment is not None
    n_prompts = cfg.sft.on_policy_pairs.n_prompts
    with as_refusals():
        if n_prompts > 0:
            check_verifiable("sft.on_policy_pairs.n_prompts", n_prompts, task)
        RewardRule(cfg.reward, cfg.parts.reward_functions).check_sources(task, has_environment)
    require(
        n_prompts == 0 or not has_environment,
        f"sft.on_policy_pairs.n_prompts={n_prompts} pairs solutions with wrong answers of one turn, and with "
        "an environment there are several; use 0, or environment=none",
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
