"""Rules on how the weights of a model are held."""

from omegaconf import DictConfig

from lit_rlkv.config.building import ConfigError
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.models.loading import QUANTIZATIONS


def check_quantization(cfg: DictConfig) -> None:
    """Refuse a quantized backbone where something else must train its weights, or it has none yet.

    Raises:
        ConfigError: the first rule that is broken.
    """
    quantization, layout = cfg.fabric.quantization, cfg.roles.layout
    if quantization is None:
        return
    given = f"fabric.quantization={quantization}"
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"{given} is unknown; choose {', '.join(QUANTIZATIONS)}, or null")
    if cfg.model.path is None:
        raise ConfigError(f"{given} is of a checkpoint; give model.path, or use null")
    if "sft" in cfg.stages:
        raise ConfigError(f"{given}, but sft trains all weights; use stages=[rl,eval], or null")
    if layout in LAYOUTS and LAYOUTS[layout].trains_backbones:
        raise ConfigError(f"{given}, but roles={layout} trains all weights; use roles=hydra or so, or null")
