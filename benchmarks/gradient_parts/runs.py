"""Runs of the default testbed whose policy stands still, so that every iteration is a fresh rollout of it."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.config import CONF_DIR, Config, build
from lit_rlkv.diagnostics.covariance import PartGradients
from lit_rlkv.run_files import CHECKPOINTS
from lit_rlkv.runs.checkpoint import CheckpointDir, load_trainable
from lit_rlkv.runs.policy import make_policy
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.starting_model import find_starting_model
from lit_rlkv.stages.rl import train_policy
from lit_rlkv.stages.sft import run_sft

STANDS_STILL = (
    "optimizer.lr=1e-30",  # too small to change a weight; 0 is refused
    "optimizer.weight_decay=0",
    "algorithm.n_epochs=1",
    "algorithm.n_minibatches=1",
    "algorithm.n_warmup_steps=0",
    "algorithm.max_grad_norm=1e9",
    "callbacks.checkpoint_every=1000000",
)
"""One optimizer step on each rollout, which changes nothing."""


def config(*overrides: str) -> Config:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("config", overrides=["fabric.n_threads=1", *overrides])
    return checked_config(cfg)


def run(cfg: Config, callbacks: list[RLCallback], trained: Path | None = None) -> None:
    """RL with these callbacks and the config's distillation, from the SFT model or from a run's adapters."""
    with tempfile.TemporaryDirectory() as folder:
        parts = Run(cfg, folder=Path(folder))
        start = find_starting_model(cfg, Path(folder)) or run_sft(parts, [])
        module = make_policy(parts, start)
        if trained is not None:
            saved = CheckpointDir(trained / CHECKPOINTS).latest()
            if saved is None:
                raise SystemExit(f"{trained} holds no checkpoint; give the folder of a run of the same roles")
            load_trainable(module, saved.weights())
        if cfg.distillation is not None:
            callbacks = [*callbacks, build(cfg.distillation)]
        train_policy(parts, module, callbacks)


class Log(RLCallback):
    """The metrics of every iteration; stands behind the diagnostics."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        self.rows.append(dict(metrics))


class FreshGradients(RLCallback):
    """Return the gradient that training leaves in `.grad` for each rollout, by brute force."""

    def __init__(self) -> None:
        self.found = PartGradients()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients: list[Tensor] = [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()
            for parameter in pl_module.roles.trained_parameters("policy")
        ]
        self.found.add({"all": torch.cat(gradients)}, 1)
