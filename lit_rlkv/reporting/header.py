"""The first lines of a run on the terminal: what is trained, how, and where."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lit_rlkv.config import CONF_DIR, Config
from lit_rlkv.config.composing import options_of
from lit_rlkv.config.options import leaves, named_items, show
from lit_rlkv.models.layouts import LAYOUTS

SMOKE_TEST = "debug=fast is a smoke test: every stage runs, and nothing is learned"
EMULATED = "this CPU has no instructions for bfloat16 and emulates it; fabric.precision=32-true needs none"


def header(
    cfg: Config, run_dir: Path, n_ranks: int, device: torch.device, choices: Mapping[str, str | None]
) -> list[str]:
    """Return the lines of the header.

    Args:
        choices: options of the config groups, as Hydra reports them; empty if they are unknown.
    """
    rollout, algorithm, cache, fabric = cfg.rollout, cfg.algorithm, cfg.cache, cfg.fabric
    pool = "dense" if cache.policy == "dense" else f"{cache.policy}, budget {cache.budget} + {cache.interval}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    quantized = "" if fabric.quantization is None else f", {fabric.quantization} weights"
    fields = {
        "run": os.path.relpath(run_dir) if run_dir.is_relative_to(Path.cwd()) else str(run_dir),
        "task": _with_arguments(cfg.task),
        "model": cfg.model.path or f"{_name(cfg.model.preset)}, from random weights",
        "algorithm": f"{_name(algorithm.loss)}, {algorithm.n_iterations} iterations of {rollout.n_prompts} "
        f"prompts × {algorithm.group_size} responses",
        "arm": arm(cfg, choices.get("experiment")),
        "roles": _roles(cfg),
        "cache": pool,
        "seed": str(cfg.seed),
        "devices": f"{n_ranks} × {where}, precision {fabric.precision}{quantized}",
        "stages": ", ".join(cfg.stages),
    }
    lines = [f"{name:<10} {value}" for name, value in fields.items()]
    notes = {
        SMOKE_TEST: choices.get("debug") == "fast",
        EMULATED: fabric.precision.startswith("bf16") and emulates_bfloat16(device),
    }
    return lines + [note for note, is_true in notes.items() if is_true]


def emulates_bfloat16(device: torch.device) -> bool:
    """True on an x86 CPU without instructions for products in bfloat16."""
    if device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    has_instructions = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # private, so it may go away
    return has_instructions is not None and not has_instructions()


def _roles(cfg: Config) -> str:
    """Return the layout of the roles, what is trained of their weights, and the learning rate."""
    rate = f"learning rate {show(cfg.optimizer.get('lr'))}"
    if LAYOUTS[cfg.roles.layout].trains_backbones:
        return (
            f"{cfg.roles.layout}: all weights, no adapters (roles.rank and roles.alpha are not used), {rate}"
        )
    return f"{cfg.roles.layout}: adapters of rank {cfg.roles.rank}, {rate}"


def trained_parameters(module: nn.Module) -> str:
    """Return the number of trained parameters and their share of all."""
    counts = [(each.numel(), each.requires_grad) for each in module.parameters()]
    n_all, n_trained = sum(n for n, _ in counts), sum(n for n, is_trained in counts if is_trained)
    return f"{n_trained:,} of {n_all:,} parameters are trained ({n_trained / n_all:.1%})"


def arm(cfg: Config, experiment: str | None) -> str:
    """Return the names of correction and distillation, and of the preset that may have chosen them."""
    correction = _option("correction", cfg.correction)
    distillation = "none" if cfg.distillation is None else _option("distillation", cfg.distillation)
    preset = f" (experiment={experiment})" if experiment not in (None, "none") else ""
    return f"correction {correction}, distillation {distillation}{preset}"


def _option(group: str, node: DictConfig) -> str:
    """Return the option of a group that has the fewest other values, with these; else the node's class."""
    own = dict(leaves(OmegaConf.to_container(node)))
    closest: tuple[str, list[str]] | None = None
    for option in options_of(group):
        other = dict(leaves(OmegaConf.to_container(OmegaConf.load(CONF_DIR / group / f"{option}.yaml"))))
        if other.keys() == own.keys():
            changed = [f"{key}={show(value)}" for key, value in own.items() if value != other[key]]
            if closest is None or len(changed) < len(closest[1]):
                closest = option, changed
    if closest is None:
        return _name(node)
    name, changed = closest
    return f"{name} with {', '.join(changed)}" if changed else name


def _name(node: DictConfig | None) -> str:
    """Return the name of the class or function that a node names."""
    return "none" if node is None else str(node.get("_target_", "none")).rpartition(".")[2]


def _with_arguments(node: DictConfig) -> str:
    """Return the class that a node names, with those of its arguments that are single values."""
    single = {name: value for name, value in named_items(node) if isinstance(value, bool | int | float | str)}
    return f"{_name(node)}({', '.join(f'{name}={show(value)}' for name, value in single.items())})"
