"""Rules on how the weights of a model are held."""

from collections.abc import Iterator

from omegaconf import DictConfig

from lit_rlkv.config.building import ConfigError
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.models.loading import QUANTIZATIONS


def check_precision(cfg: DictConfig) -> None:
    """Refuse to keep in bfloat16 what learns: an update below half a step of its numbers is lost.

    Raises:
        ConfigError: the SFT stage or the layout trains the backbone's own weights.
    """
    for who, instead in _trainers_of_weights(cfg) if cfg.fabric.precision == "bf16-true" else ():
        raise ConfigError(
            f"fabric.precision=bf16-true rounds small updates of the weights that {who} trains away; use "
            f"fabric.precision=bf16-mixed, or {instead}"
        )


def _trainers_of_weights(cfg: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield the settings that train the backbone's own weights, each with an alternative."""
    if "sft" in cfg.stages:
        yield "sft", "stages=[rl,eval]"
    layout = cfg.roles.layout
    if layout in LAYOUTS and LAYOUTS[layout].trains_backbones:
        yield f"roles={layout}", "roles=hydra or so"


def check_quantization(cfg: DictConfig) -> None:
    """Refuse a quantized backbone where something else must train its weights, or it has none yet.

    Raises:
        ConfigError: the first rule that is broken.
    """
    quantization = cfg.fabric.quantization
    if quantization is None:
        return
    given = f"fabric.quantization={quantization}"
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"{given} is unknown; choose {', '.join(QUANTIZATIONS)}, or null")
    if cfg.model.path is None:
        raise ConfigError(f"{given} is of a checkpoint; give model.path, or use null")
    for who, instead in _trainers_of_weights(cfg):
        raise ConfigError(f"{given}, but {who} trains all weights; use {instead}, or null")
