"""The node `reward` and its functions as objects."""

from omegaconf import DictConfig

from lit_rlkv.config.building import ConfigError, as_config_errors, build
from lit_rlkv.experience.reward import RewardConfig
from lit_rlkv.rewards import RewardFunction


def build_reward(node: DictConfig) -> RewardConfig:
    """Build the reward config; no code of the user runs yet.

    Raises:
        ConfigError: weights or functions that cannot work.
    """
    functions = {str(name): _function(str(name), each) for name, each in node.functions.items()}
    options = {str(name): value for name, value in node.items() if name != "functions"}
    with as_config_errors("reward"):
        return RewardConfig(functions=functions, **options)


def _function(name: str, node: DictConfig) -> RewardFunction:
    where = f"reward.functions.{name}"
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise ConfigError(
            f"{where}={node} names no function; give it a _target_ such as lit_rlkv.rewards.Numeric"
        )
    try:
        function = build(node)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(function, RewardFunction):
        raise ConfigError(f"{where}: {node._target_} is no reward function; choose one of lit_rlkv.rewards")
    return function
