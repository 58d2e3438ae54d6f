"""Every algorithm with every arm, every distillation and every layout, through the config that users write."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lit_rlkv.callbacks.distillation import ShadowDistillation
from lit_rlkv.callbacks.statistics import RolloutStatistics
from lit_rlkv.checkpoint import CheckpointDir
from lit_rlkv.config import CONF_DIR, ConfigError, build, check_config
from lit_rlkv.models.hydra import LAYOUTS
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.stages.parts import build_parts
from lit_rlkv.stages.training import make_policy, train_policy
from lit_rlkv.stages.warmup import start_folder, warm_up
from tests.training import MetricLog

SMALL = [
    "debug=fast",
    "experiment=none",
    "model.preset.hidden_size=32",
    "model.preset.num_hidden_layers=2",
    "model.preset.head_dim=8",
    "model.preset.intermediate_size=32",
    "task.n_terms=3",
    "cache.budget=7",
    "cache.interval=2",
    "cache.window=2",
    "evaluation.budgets=[5]",
    "rollout.max_new_tokens=8",
    "rollout.n_prompts=4",
    "roles.rank=4",
    "reward=mixed",  # a model that is hardly trained is never right, and agrees on that
]
ALGORITHMS = ("ppo", "grpo", "online_dpo")
ARMS = ("dense", "naive", "tis", "mis", "sparse_rl", "shadow")
DISTILLATIONS = ("none", "sparse_student", "dense_student")


def config(folder: Path, *overrides: str) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        cfg = compose("config", overrides=[*SMALL, f"runs_dir={folder}", *overrides])
    check_config(cfg)
    return cfg


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    """A folder that holds the warm model that all runs start from."""
    folder = tmp_path_factory.mktemp("runs")
    warm_up(build_parts(config(folder)), [])
    return folder


@dataclass(frozen=True)
class Done:
    module: PolicyModule
    metrics: list[dict[str, float]]
    moved: set[str]
    """Names of the parameters that training changed."""


def train(folder: Path, *overrides: str) -> Done:
    cfg = config(folder, "stages=[rl]", "callbacks.checkpoint_every=9", *overrides)
    parts = build_parts(cfg)
    start = start_folder(cfg, folder / "run")
    assert start is not None
    module = make_policy(parts, start)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    log = MetricLog()
    callbacks = [RolloutStatistics(), *([] if cfg.distillation is None else [build(cfg.distillation)]), log]
    train_policy(parts, module, callbacks, CheckpointDir(folder / "checkpoints"), None)
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    return Done(module, log.rows, moved)
