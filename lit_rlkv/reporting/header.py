"""The first lines of a run on the terminal: what is trained, how, and where."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from torch import nn

from lit_rlkv.config import Config
from lit_rlkv.config.options import show
from lit_rlkv.models.layouts import LAYOUTS
from lit_rlkv.reporting.describe import describe

SMOKE_TEST = "debug=fast is a smoke test: every stage runs, and nothing is learned"
EMULATED = "this CPU has no instructions for bfloat16 and emulates it; fabric.precision=32-true needs none"


def header(
    cfg: Config, run_dir: Path, n_ranks: int, device: torch.device, choices: Mapping[str, str | None]
) -> list[str]:
    """Return the lines of the header.

    Args:
        choices: options of the config groups, as Hydra reports them; empty if they are unknown.
    """
    config = cast("dict[str, Any]", OmegaConf.to_container(cfg.source))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    precision, quantization = cfg.fabric.precision, cfg.fabric.quantization
    quantized = "" if quantization is None else f", {quantization} weights"
    fields = {
        "run": os.path.relpath(run_dir) if run_dir.is_relative_to(Path.cwd()) else str(run_dir),
        **{heading.lower(): text for heading, text in describe(config).items()},
        "roles": _roles(cfg),
        "devices": f"{n_ranks} × {where}, precision {precision}{quantized}",
        "stages": ", ".join(cfg.stages),
    }
    lines = [f"{name:<10} {value}" for name, value in fields.items()]
    notes = {
        SMOKE_TEST: choices.get("debug") == "fast",
        EMULATED: precision.startswith("bf16") and emulates_bfloat16(device),
    }
    return lines + [note for note, is_true in notes.items() if is_true]


def _roles(cfg: Config) -> str:
    """Return the layout of the roles, what is trained of their weights, and the learning rate."""
    weights = f"adapters of rank {cfg.roles.rank}"
    if LAYOUTS[cfg.roles.layout].trains_backbones:
        weights = "all weights, no adapters (roles.rank and roles.alpha are not used)"
    return f"{cfg.roles.layout}: {weights}, learning rate {show(cfg.optimizer.get('lr'))}"


def emulates_bfloat16(device: torch.device) -> bool:
    """True on an x86 CPU without instructions for products in bfloat16."""
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    has_instructions = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # private, so it may go away
    return has_instructions is not None and not has_instructions()


def trained_parameters(module: nn.Module) -> str:
    """Return the number of trained parameters and their share of all."""
    counts = [(each.numel(), each.requires_grad) for each in module.parameters()]
    n_all, n_trained = sum(n for n, _ in counts), sum(n for n, is_trained in counts if is_trained)
    return f"{n_trained:,} of {n_all:,} parameters are trained ({n_trained / n_all:.1%})"
