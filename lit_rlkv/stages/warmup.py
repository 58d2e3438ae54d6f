"""Hydra-SFT: the warm model that RL starts from, made once and kept for every later run."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning import Callback
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file

from lit_rlkv.callbacks.hooks import check_hooks
from lit_rlkv.config import ConfigError, build, expanded
from lit_rlkv.data.demonstrations import PreferenceDataModule
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.loop import train
from lit_rlkv.modules.hydra_sft import HydraSFT
from lit_rlkv.stages.parts import BACKBONE, Parts, load_backbone

WARM_FORMAT = 1
"""Raised when warm-up changes what it writes or computes, so that no older result is taken for a new one."""
WARM_DONE = "warm.json"
REWARD_HEAD = "reward_head.safetensors"


def warm_folder(cfg: DictConfig) -> Path:
    """Where the warm model of this config is, or will be: named by everything that it depends on."""
    parts = {name: OmegaConf.to_container(cfg[name], resolve=True) for name in ("task", "model", "sft")}
    files = [_fingerprint(cfg[name].get("path")) for name in ("task", "model")]
    text = json.dumps([WARM_FORMAT, torch.__version__, cfg.fabric.precision, parts, files], sort_keys=True)
    return Path(cfg.runs_dir) / "warm" / hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _fingerprint(path: str | None) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the local files at a path, so that changed content is another warm model."""
    root = Path(path).expanduser() if path is not None else None
    if root is None or not root.exists():
        return []
    files = sorted(root.iterdir()) if root.is_dir() else [root]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def start_folder(cfg: DictConfig, run_dir: Path) -> str | Path | None:
    """The model that RL and evaluation start from, None while it still has to be warmed up.

    A run that is resumed has its own; then, unless `stages` take `model.path` as it is, comes the warm model.

    Raises:
        ConfigError: `stages` leave out sft, and there is neither a warm model nor a `model.path`.
    """
    warm = warm_folder(cfg)
    if (run_dir / BACKBONE / WARM_DONE).is_file():
        return run_dir / BACKBONE
    if "sft" not in cfg.stages and cfg.model.path is not None:
        return expanded(cfg.model.path)
    if (warm / WARM_DONE).is_file():
        return warm
    if "sft" in cfg.stages:
        return None
    raise ConfigError(
        f"stages={list(cfg.stages)} start from a warm model, but no earlier run left one for this config "
        f"in {warm.parent}; add sft to stages, or give model.path"
    )


def warm_up(parts: Parts, callbacks: Sequence[Callback]) -> Path:
    """Hydra-SFT on worked solutions; the result is kept for the next run with this config to start from."""
    cfg = parts.cfg.sft
    backbone = load_backbone(parts, expanded(parts.cfg.model.path))
    module = HydraSFT(
        backbone,
        build(cfg.optimizer),
        reward_weight=cfg.reward_weight,
        n_steps=cfg.n_steps,
        n_warmup_steps=cfg.n_warmup_steps,
    )
    datamodule = PreferenceDataModule(
        parts.task,
        PromptSource(parts.task, split="train", seed=cfg.seed),
        parts.tokenizer,
        batch_size=cfg.batch_size,
        n_pairs=cfg.n_pairs,
        steps_per_loader=min(cfg.steps_per_iteration, cfg.n_steps),
        seed=cfg.seed,
    )
    check_hooks(callbacks)
    train(
        parts.fabric,
        module,
        datamodule,
        callbacks=callbacks,
        n_iterations=cfg.n_steps // datamodule.steps_per_loader,
        max_grad_norm=cfg.max_grad_norm,
    )
    folder = warm_folder(parts.cfg)
    # Named by process: two runs may warm up the same model at once, and the first to finish stays.
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    backbone.save_pretrained(partial)
    parts.tokenizer.save_pretrained(partial)
    save_file(module.reward_head.state_dict(), partial / REWARD_HEAD)
    (partial / WARM_DONE).write_text(json.dumps({"config": OmegaConf.to_container(cfg, resolve=True)}))
    if folder.exists():
        shutil.rmtree(partial)
    else:
        os.replace(partial, folder)
    return folder
