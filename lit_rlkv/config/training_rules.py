"""Rules on what every optimizer step takes: its seed, its optimizer, its bound on gradients, its weights."""

from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from lit_rlkv.checks import is_number, is_whole
from lit_rlkv.config.building import ConfigError, build, require


def check_training(cfg: DictConfig) -> None:
    """Check settings that would fail at the first optimizer step, or train nothing.

    Raises:
        ConfigError: the first rule that is broken.
    """
    for name in ("seed", "sft.seed"):
        seed = OmegaConf.select(cfg, name)
        require(
            is_whole(seed),
            f"{name}={seed} is no whole number; give one, such as {name}=0",
        )
    for name in ("algorithm.max_grad_norm", "sft.max_grad_norm"):
        norm = OmegaConf.select(cfg, name)
        require(
            norm is None or (is_number(norm) and norm > 0),
            f"{name}={norm} is not a number above 0 that gradients are clipped to; give one, or null, "
            "which clips none",
        )
    _check_weigh(cfg.correction.weigh)
    for name in ("optimizer", "sft.optimizer"):
        _check_optimizer(name, OmegaConf.select(cfg, name))


def _check_weigh(weigh: DictConfig) -> None:
    bounds = _options(weigh)
    for name, value in bounds.items():
        least = "above 0" if name in ("cap", "high") else "of at least 0"
        require(
            is_number(value) and (value > 0 if least == "above 0" else value >= 0),
            f"correction.weigh.{name}={value} bounds a ratio of probabilities; give a number {least}",
        )
    low, high = bounds.get("low"), bounds.get("high")
    require(
        low is None or high is None or low < high,
        f"correction.weigh.low={low} is not below correction.weigh.high={high}, so that nothing would count; "
        "lower it",
    )


def _check_optimizer(name: str, node: DictConfig) -> None:
    """Build it once, for a parameter of nothing."""
    try:
        build(node)([torch.nn.Parameter(torch.zeros(1, 1))])
    except Exception as error:  # whatever an optimizer says of its options
        given = ", ".join(f"{option}={value}" for option, value in _options(node).items())
        raise ConfigError(f"{name}: {node._target_} does not take {given}: {error}; mend them") from error


def _options(node: DictConfig) -> dict[str, Any]:
    return {str(name): value for name, value in node.items() if not str(name).startswith("_")}
