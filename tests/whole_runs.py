"""Whole runs composed from the configs at a size that takes a second, for tests that need a run's folder."""

import csv
import os
import socket
import subprocess
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from filelock import FileLock
from hydra import compose, initialize_config_dir
from lightning.fabric import Fabric
from rich.console import Console

from lit_rlkv.config import CONF_DIR
from lit_rlkv.config.commands import EvaluateConfig
from lit_rlkv.fit import fit
from lit_rlkv.reporting.plots import style
from lit_rlkv.runs.launch import FSDP2, fabric_precision, make_fabric
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.starting_model import SFT_DONE, SFT_MODELS, sft_model_dir
from lit_rlkv.stages.sft import run_sft

MODEL = [
    "debug=fast",
    "model.preset.hidden_size=32",
    "model.preset.num_hidden_layers=2",
    "model.preset.head_dim=8",
    "model.preset.intermediate_size=32",
]
TINY = [
    *MODEL,
    "++task.n_terms=3",  # so that ~task.n_terms gives place to another task
    "cache.budget=7",
    "cache.interval=2",
    "cache.window=2",
    "evaluation.budgets=[5]",
    "rollout.max_new_tokens=8",
]
"""Sums of three terms; a cache that evicts on both sides of the prompt's end."""


def composed(*overrides):
    """Return what Hydra makes of the overrides, unchecked."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose("config", overrides=[*overrides])


def config(tmp_path, *overrides):
    return checked_config(composed(*TINY, f"runs_dir={tmp_path}", *overrides))


def rows_of(folder):
    """Return the metrics of a run's iterations, as texts."""
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@contextmanager
def plain_reports():
    """Leave the pictures on pages empty: to draw them takes longer than all else in a tiny run."""
    with patch.object(style, "svg", lambda figure, key: "<svg/>"):
        yield


def run(tmp_path, name, *overrides, resumes=False, draws=False):
    """Do a whole run in its folder; only if `draws`, its report has pictures."""
    cfg = config(tmp_path, *overrides)
    with nullcontext() if draws else plain_reports():
        return fit(cfg, tmp_path / name, Console(quiet=True), resumes=resumes)


def shared_sft_model(cfg, shared):
    """Return the folder of the SFT model of this config; the first test worker that needs it trains it.

    `cfg.runs_dir` gets a link to the models in `shared`, so runs in that folder start from them.
    """
    models = Path(cfg.runs_dir) / SFT_MODELS
    if not models.exists():
        (shared / SFT_MODELS).mkdir(exist_ok=True)
        models.symlink_to(shared / SFT_MODELS)
    folder = sft_model_dir(cfg)
    with FileLock(shared / f"{folder.name}.lock"):
        if not (folder / SFT_DONE).is_file():
            run_sft(Run(cfg), [])
    return folder


def run_on_ranks(tmp_path, name, n_ranks, *overrides, resumes=False):
    """Run on several processes, which are forks of this one."""
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
    """Set the environment of one of the processes that torchrun starts."""
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
    with plain_reports():
        fit(cfg, run_dir, Console(quiet=True), resumes=resumes, fabric=fabric)


def said_by(process):
    """Return the output of a process and its children, once all have ended."""
    try:
        return process.communicate(timeout=300)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # which ends the others
        raise


def scoring(folder):
    """Return the default options of evaluate for this run folder."""
    return EvaluateConfig(ckpt=str(folder))
