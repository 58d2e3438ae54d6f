"""Checks of an algorithm: advantage, loss and KL, and how rollouts are divided over steps and ranks."""

from hydra.utils import get_object

from lit_rlkv.config import Config, ConfigError, as_config_errors, build, require
from lit_rlkv.config.options import named_items
from lit_rlkv.config.schema import AlgorithmConfig
from lit_rlkv.experience.advantages import AdvantageEstimator, PairAdvantage
from lit_rlkv.objectives.kl import MAX_ERROR


def check_algorithm(cfg: Config) -> None:
    """Check the parts of an algorithm, alone and together.

    Raises:
        ConfigError: the first rule that is broken.
    """
    with as_config_errors("algorithm.advantage"):
        advantage: AdvantageEstimator = build(cfg.algorithm.advantage).for_task(build(cfg.task))
    _check_advantage(cfg, advantage)
    _check_loss(cfg.algorithm, advantage)
    _check_parts(cfg, advantage)
    _check_kl(cfg, advantage)
    _check_critic(cfg.algorithm, advantage)


def _check_advantage(cfg: Config, advantage: AdvantageEstimator) -> None:
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


def _check_parts(cfg: Config, advantage: AdvantageEstimator) -> None:
    algorithm = cfg.algorithm
    n_rows = cfg.rollout.n_prompts * algorithm.group_size
    n_units = cfg.rollout.n_prompts if isinstance(advantage, PairAdvantage) else n_rows
    n_parts = algorithm.n_minibatches * algorithm.n_micro_batches
    require(
        1 <= n_parts <= n_units,
        f"n_minibatches × n_micro_batches = {n_parts} parts cannot be cut from {n_units} "
        f"{'pairs' if isinstance(advantage, PairAdvantage) else 'responses'}; lower them",
    )


def _check_kl(cfg: Config, advantage: AdvantageEstimator) -> None:
    algorithm = cfg.algorithm
    n_rows = cfg.rollout.n_prompts * algorithm.group_size
    kl = algorithm.kl
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


def _check_critic(algorithm: AlgorithmConfig, advantage: AdvantageEstimator) -> None:
    has_critic = "value" in advantage.needs
    require(
        0 <= algorithm.critic_warmup < algorithm.n_iterations
        and (has_critic or algorithm.critic_warmup == 0),
        f"algorithm.critic_warmup={algorithm.critic_warmup}: give 0 without a critic, and fewer than "
        f"n_iterations={algorithm.n_iterations} with one",
    )


def check_shares(cfg: Config, n_ranks: int) -> None:
    """Check that prompts and rows of the SFT stage can be divided evenly among the ranks.

    Raises:
        ConfigError: they cannot; ranks with less work would wait for the others.
    """
    n_shards = cfg.rollout.n_shards or n_ranks
    if n_shards % n_ranks:
        raise ConfigError(
            f"rollout.n_shards={n_shards} cannot be divided evenly over {n_ranks} processes; give a "
            "multiple of it, or null"
        )
    shared = {"rollout.n_prompts": (cfg.rollout.n_prompts, n_shards)}
    if "sft" in cfg.stages:
        shared |= {"sft.batch_size": (cfg.sft.batch_size, n_ranks), "sft.n_pairs": (cfg.sft.n_pairs, n_ranks)}
    for name, (value, n_parts) in shared.items():
        if value % n_parts:
            raise ConfigError(
                f"{name}={value} cannot be divided evenly over {n_parts} "
                f"{'shards' if n_parts == n_shards else 'processes'}; give a multiple of {n_parts}"
            )
    algorithm = cfg.algorithm
    n_cuts = algorithm.n_minibatches * algorithm.n_micro_batches
    pairs = issubclass(get_object(algorithm.advantage._target_), PairAdvantage)
    n_own = cfg.rollout.n_prompts // n_shards * (1 if pairs else algorithm.group_size)
    if n_shards > 1 and n_own < n_cuts:
        raise ConfigError(
            f"n_minibatches × n_micro_batches = {n_cuts} parts cannot be cut from the {n_own} "
            f"{'pairs' if pairs else 'responses'} of each of {n_shards} shards; lower them, or raise "
            "rollout.n_prompts"
        )
