"""The model that RL starts from: where an SFT model is kept, and which one a run takes."""

import hashlib
import json
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from lit_rlkv.config import Config, ConfigError, expanded
from lit_rlkv.config.options import show
from lit_rlkv.files import stamps
from lit_rlkv.runs.context import BACKBONE
from lit_rlkv.runs.saver import REWARD_MODEL

REWARD_HEAD = "reward_head.safetensors"
SFT_FORMAT = 1
"""Increased when the SFT stage changes what it computes or writes, so that no older model is reused."""
SFT_MODELS, SFT_DONE = "sft_models", "sft.json"
"""The shared folder of all SFT models, and the file that marks a finished one."""


def critic_dir(start: str | Path) -> str | Path:
    """Where the critics' backbone and reward head are: the SFT model itself unless it has them apart."""
    apart = Path(start) / REWARD_MODEL
    return apart if apart.is_dir() else start


def load_reward_head(folder: str | Path) -> dict[str, Tensor] | None:
    """The trained reward head beside a backbone, None where there is none."""
    path = Path(folder) / REWARD_HEAD
    return load_file(path) if path.is_file() else None


def sft_model_dir(cfg: Config) -> Path:
    """Where the SFT model of this config is, or will be: named by everything that it depends on."""
    has_mistakes = cfg.sft.on_policy_pairs.n_prompts > 0
    # The model's own mistakes are those that it makes under this cache, drawn a batch at a time.
    names = ("task", "model", "sft", *(("cache", "rollout") if has_mistakes else ()))
    parts = {name: OmegaConf.to_container(cfg.source[name]) for name in names}
    parts |= {"batch_size": cfg.evaluation.batch_size} if has_mistakes else {}
    if has_mistakes and cfg.reward.accuracy is not None:  # which says what is a mistake
        function = cfg.reward.functions[cfg.reward.accuracy]
        parts["accuracy"] = OmegaConf.to_container(function)
    sources = (cfg.task.get("path"), cfg.task.get("dataset"), cfg.model.path)
    files = [[] if source is None else stamps(Path(source).expanduser()) for source in sources]
    text = json.dumps([SFT_FORMAT, torch.__version__, cfg.fabric.precision, parts, files], sort_keys=True)
    return Path(cfg.runs_dir) / SFT_MODELS / hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def find_starting_model(cfg: Config, run_dir: Path) -> str | Path | None:
    """Return the model that RL and evaluation start from; None if the SFT stage has to train it.

    A run that is resumed has its own; then, unless `stages` take `model.path` as it is, comes the SFT model.

    Raises:
        ConfigError: `stages` leave out sft, and there is neither a SFT model nor a `model.path`.
    """
    shared = sft_model_dir(cfg)
    if (run_dir / BACKBONE / SFT_DONE).is_file():
        return run_dir / BACKBONE
    if "sft" not in cfg.stages and cfg.model.path is not None:
        return expanded(cfg.model.path)
    if (shared / SFT_DONE).is_file():
        return shared
    if "sft" in cfg.stages:
        return None
    raise ConfigError(
        f"stages={show(cfg.stages)} start from a SFT model, but no earlier run left one for this config "
        f"in {shared.parent}; add sft to stages, or give model.path"
    )
