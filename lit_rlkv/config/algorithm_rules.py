"""Checks of an algorithm: advantage, loss and KL options, and the number of minibatches."""

from collections.abc import Collection

from hydra.utils import get_object
from omegaconf import DictConfig

from lit_rlkv.checks import is_number
from lit_rlkv.config.building import as_config_errors, build, require
from lit_rlkv.experience.advantages import AdvantageEstimator, PairAdvantage
from lit_rlkv.experience.settings import KLConfig
from lit_rlkv.objectives.kl import MAX_ERROR
from lit_rlkv.objectives.reduction import AGGREGATIONS


def check_algorithm(cfg: DictConfig) -> None:
    """Each part of an algorithm by itself, and with the others.

    Raises:
        ConfigError: the first rule that is broken.
    """
    with as_config_errors("algorithm.advantage"):
        advantage: AdvantageEstimator = build(cfg.algorithm.advantage).for_task(build(cfg.task))
    _check_credit(cfg, advantage)
    _check_loss(cfg.algorithm, advantage)
    _check_parts(cfg, advantage)
    _check_kl(cfg, advantage)
    _check_critic(cfg.algorithm, advantage)


def _check_credit(cfg: DictConfig, advantage: AdvantageEstimator) -> None:
    algorithm = cfg.algorithm
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


def _check_loss(algorithm: DictConfig, advantage: AdvantageEstimator) -> None:
    tables: dict[str, Collection[str]] = {
        "lr_schedule": ("linear", "constant"),
        "aggregation": AGGREGATIONS,
    }
    for name, table in tables.items():
        require(
            algorithm[name] in table,
            f"algorithm.{name}={algorithm[name]!r} is unknown; choose one of {', '.join(table)}",
        )
    module = get_object(algorithm.loss._target_)
    require(
        isinstance(advantage, module.advantage_estimator),
        f"algorithm.advantage: {module.__name__} learns from {module.advantage_estimator.__name__}, not from "
        f"{type(advantage).__name__}; choose an algorithm and change its options",
    )
    missing = [name for name in module.required_options if name not in algorithm.loss]
    require(not missing, f"algorithm.loss lacks {', '.join(missing)}; {module.__name__} needs each of them")
    with as_config_errors(algorithm.loss._target_):
        options = {name: value for name, value in algorithm.loss.items() if not name.startswith("_")}
        module.check_options(**options)


def _check_parts(cfg: DictConfig, advantage: AdvantageEstimator) -> None:
    algorithm = cfg.algorithm
    n_rows = cfg.rollout.n_prompts * algorithm.group_size
    n_units = cfg.rollout.n_prompts if isinstance(advantage, PairAdvantage) else n_rows
    n_parts = algorithm.n_minibatches * algorithm.n_micro_batches
    require(
        1 <= n_parts <= n_units,
        f"n_minibatches × n_micro_batches = {n_parts} parts cannot be cut from {n_units} "
        f"{'pairs' if isinstance(advantage, PairAdvantage) else 'responses'}; lower them",
    )


def _check_kl(cfg: DictConfig, advantage: AdvantageEstimator) -> None:
    algorithm = cfg.algorithm
    n_rows = cfg.rollout.n_prompts * algorithm.group_size
    target, horizon = algorithm.kl.get("target"), algorithm.kl.get("horizon", 1)
    require(
        (target is None or is_number(target)) and is_number(horizon),
        f"algorithm.kl.target={target} or algorithm.kl.horizon={horizon} is no number; give numbers, or "
        "target=null, which steers nothing",
    )
    with as_config_errors("algorithm.kl"):
        kl = KLConfig(**algorithm.kl)
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


def _check_critic(algorithm: DictConfig, advantage: AdvantageEstimator) -> None:
    has_critic = "value" in advantage.needs
    require(
        0 <= algorithm.critic_warmup < algorithm.n_iterations
        and (has_critic or algorithm.critic_warmup == 0),
        f"algorithm.critic_warmup={algorithm.critic_warmup}: give 0 without a critic, and fewer than "
        f"n_iterations={algorithm.n_iterations} with one",
    )
