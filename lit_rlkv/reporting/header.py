"""The first lines of a run on the terminal: what is trained, how, and where."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from torch import nn

from lit_rlkv.config import Config
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.reporting.describe import describe
from lit_rlkv.settings import show

SMOKE_TEST = "debug=fast is a smoke test: every stage runs, and nothing is learned"


def header(
    cfg: Config, run_dir: Path, n_ranks: int, device: torch.device, choices: Mapping[str, str | None]
) -> list[str]:
    """Return the lines of the header.

    Args:
        choices: options of the config groups, as Hydra reports them; empty if they are unknown.
    """
    config = cast("dict[str, Any]", OmegaConf.to_container(cfg.source))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    quantized = "" if cfg.fabric.quantization is None else f", {cfg.fabric.quantization} weights"
    fields = {
        "run": os.path.relpath(run_dir) if run_dir.is_relative_to(Path.cwd()) else str(run_dir),
        **{heading.lower(): text for heading, text in describe(config).items()},
        "roles": _roles(cfg),
        "devices": f"{n_ranks} × {where}, precision {cfg.fabric.precision}{quantized}",
        "stages": ", ".join(cfg.stages),
    }
    notes = [SMOKE_TEST] if choices.get("debug") == "fast" else []
    width = max(10, *map(len, fields))
    return [f"{name:<{width}} {value}" for name, value in fields.items()] + notes


def _roles(cfg: Config) -> str:
    """Return the layout of the roles, what is trained of their weights, and the learning rate."""
    weights = f"adapters of rank {cfg.roles.rank}"
    if LAYOUTS[cfg.roles.layout].trains_backbones:
        weights = "all weights, no adapters (roles.rank and roles.alpha are not used)"
    return f"{cfg.roles.layout}: {weights}, learning rate {show(cfg.optimizer.get('lr'))}"


def trained_parameters(module: nn.Module) -> str:
    """Return the number of trained parameters and their share of all."""
    counts = [(each.numel(), each.requires_grad) for each in module.parameters()]
    n_all, n_trained = sum(n for n, _ in counts), sum(n for n, is_trained in counts if is_trained)
    return f"{n_trained:,} of {n_all:,} parameters are trained ({n_trained / n_all:.1%})"
