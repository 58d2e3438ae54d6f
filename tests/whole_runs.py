"""Whole runs at a size that takes a second, for tests that need a run's folder."""

import os
import socket
import subprocess

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from lightning.fabric import Fabric
from omegaconf import OmegaConf
from rich.console import Console

from lit_rlkv.config import CONF_DIR
from lit_rlkv.config.fabric_rules import FSDP2
from lit_rlkv.config.rules import check_config
from lit_rlkv.fit import fit
from lit_rlkv.runs.launch import fabric_precision, make_fabric

MODEL = [
    "debug=fast",
    "model.preset.hidden_size=32",
    "model.preset.num_hidden_layers=2",
    "model.preset.head_dim=8",
    "model.preset.intermediate_size=32",
]
TINY = [
    *MODEL,
    "task.n_terms=3",
    "cache.budget=7",
    "cache.interval=2",
    "cache.window=2",
    "evaluation.budgets=[5]",
    "rollout.max_new_tokens=8",
]
"""Sums of three terms; a cache that evicts on both sides of the prompt's end."""


def config(tmp_path, *overrides):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("config", overrides=[*TINY, f"runs_dir={tmp_path}", *overrides])
    check_config(cfg)
    return cfg


def run(tmp_path, name, *overrides, resumes=False):
    cfg = config(tmp_path, *overrides)
    return fit(cfg, tmp_path / name, Console(quiet=True), resumes=resumes)


def run_on_ranks(tmp_path, name, n_ranks, *overrides, resumes=False):
    """The same on several processes, which are forks of this one."""
    cfg = config(tmp_path, *overrides)
    if cfg.fabric.strategy == FSDP2:  # which Fabric itself starts in no fork
        args = (n_ranks, free_port(), cfg, tmp_path / name, resumes)
        torch.multiprocessing.start_processes(_fit_as_started, args, n_ranks, start_method="fork")
        return
    precision = fabric_precision(cfg.fabric.precision)
    fabric = Fabric(accelerator="cpu", devices=n_ranks, strategy="ddp_fork", precision=precision)
    fabric.launch(_fit_on_a_rank, cfg, tmp_path / name, resumes)


def _fit_as_started(rank, n_ranks, port, cfg, run_dir, resumes):
    as_rank(rank, n_ranks, port)
    fabric = make_fabric(cfg)
    fabric.launch()
    _fit_on_a_rank(fabric, cfg, run_dir, resumes)
    dist.destroy_process_group()


def as_rank(rank, n_ranks, port):
    """Make this process one of those that torchrun starts."""
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": n_ranks}
    names |= {"LOCAL_WORLD_SIZE": n_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    names |= {"TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in names.items()})


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _fit_on_a_rank(fabric, cfg, run_dir, resumes):
    fit(cfg, run_dir, Console(quiet=True), resumes=resumes, fabric=fabric)


def said_by(process):
    """What a process, and those that it started, have written when all have ended."""
    try:
        return process.communicate(timeout=300)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # which ends the others
        raise


def scoring(folder):
    """What the command line of evaluate asks for where nothing else is said."""
    options = OmegaConf.load(CONF_DIR / "evaluate.yaml")
    options.ckpt = str(folder)
    return options
