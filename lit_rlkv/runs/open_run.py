"""Open a saved run: find it by a path and load its policy at a checkpoint."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor

from lit_rlkv.config import ConfigError, as_config_errors
from lit_rlkv.config.resumed import read_config
from lit_rlkv.files import MAX_CONFIG_BYTES, read_if_there, read_text
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.non_finite import find_divergence
from lit_rlkv.reporting.run_metrics import ITERATION, read_metrics
from lit_rlkv.run_files import BACKBONE, CHECKPOINTS, CONFIG, METRICS
from lit_rlkv.runs.checkpoint import (
    Checkpoint,
    CheckpointDir,
    load_checkpoint,
    load_reference,
    load_trainable,
)
from lit_rlkv.runs.policy import make_policy
from lit_rlkv.runs.preflight import CheckedConfig, checked_config
from lit_rlkv.runs.run import Run
from lit_rlkv.runs.starting_model import backbone_id, check_backbone, pretrained_path

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedRun:
    """A run's folder, its config, and one of its checkpoints."""

    run_dir: Path
    cfg: DictConfig
    """Composed config, which may name code that this process does not trust: callers check its targets.

    They may change it before `check_run`.
    """
    config_yaml: str
    """The file as text."""
    checkpoint: Checkpoint | None
    """None: the policy before training."""
    weights: dict[str, Tensor]
    """Weights of the checkpoint, in memory, as a training run removes old files. Empty after `open_run`."""
    reference: dict[str, Tensor]
    """Weights of the reference, as `weights`; empty if the checkpoint has none."""

    @property
    def iteration(self) -> int:
        """Completed iterations of the checkpoint; 0 without one."""
        return 0 if self.checkpoint is None else self.checkpoint.iteration

    @property
    def start(self) -> str | Path:
        """Path of the model that RL started from: the SFT model in the run folder, or `model.path`.

        Raises:
            ConfigError: the run ended before it had a model.
        """
        own = self.run_dir / BACKBONE
        start = own if own.is_dir() else pretrained_path(self.cfg.model.path, self.cfg.runs_dir)
        if start is None:
            raise ConfigError(
                f"{self.run_dir} has no {BACKBONE} folder, so it ended before it had a model; resume it "
                f"(python -m lit_rlkv.fit resume={self.run_dir}), or give another run"
            )
        return start


def find_run(ckpt: Path) -> SavedRun:
    """Return the run and checkpoint of a path: a run folder (its newest checkpoint) or a checkpoint folder.

    Raises:
        ConfigError: the path is neither, or the checkpoint is broken.
    """
    with as_config_errors(f"ckpt={ckpt}"):
        if (ckpt / CONFIG).is_file():
            return _at_newest(ckpt)
        run_dir = ckpt.parent.parent
        if not (run_dir / CONFIG).is_file():
            raise ConfigError(
                f"ckpt={ckpt} is neither a run folder (with {CONFIG}) nor a checkpoint in one; "
                "give runs/NAME or runs/NAME/checkpoints/iteration-N"
            )
        return _saved_run(run_dir, load_checkpoint(CheckpointDir(ckpt.parent).named(ckpt.name)))


def _at_newest(run_dir: Path) -> SavedRun:
    checkpoint = CheckpointDir(run_dir / CHECKPOINTS).latest()
    if checkpoint is None and (trained := read_if_there(run_dir / METRICS, read_metrics, [])):
        log.warning(
            "%s has rows of %d iterations and no checkpoint, so this is the policy before training; restore "
            "its folder %s, or wait for its first checkpoint",
            run_dir,
            trained[-1][ITERATION],
            CHECKPOINTS,
        )
    try:
        return _saved_run(run_dir, checkpoint)
    except OSError:
        if checkpoint is None or checkpoint.path.is_dir():
            raise
        return _at_newest(run_dir)  # the run is training and has removed it meanwhile


def _saved_run(run_dir: Path, checkpoint: Checkpoint | None) -> SavedRun:
    weights, reference = {}, {}
    if checkpoint is not None:
        weights, reference = _copied(checkpoint.weights()), _copied(checkpoint.reference())
    cfg = read_config(run_dir)
    config_yaml = read_text(run_dir / CONFIG, MAX_CONFIG_BYTES)
    # They act in training alone, and a reference that only such a callback needs is not built here.
    cfg.logger, cfg.user_callbacks, cfg.algorithm.reference_sync.every = None, {}, None
    cfg.evaluation.perplexity = None  # its file may lie elsewhere
    return SavedRun(run_dir, cfg, config_yaml, checkpoint, weights, reference)


def _copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in weights.items()}  # the loaded tensors map the file


def check_run(run: SavedRun) -> CheckedConfig:
    """Return the checked config of a run, as it can be opened on this machine.

    Raises:
        ConfigError: the config breaks a rule.
    """
    cfg = run.cfg.copy()
    # This machine may have no CUDA.
    if cfg.rollout.cuda_graph:
        cfg.rollout.cuda_graph = None
    if cfg.kernels == "auto" and not torch.cuda.is_available():
        cfg.rollout.n_splits = None
    if cfg.fabric.accelerator in ("cuda", "gpu") and not torch.cuda.is_available():
        cfg.fabric.accelerator = "auto"
    checked = checked_config(cfg)
    # Without distillation, a teacher that only it needs is not loaded.
    checked.parts.distillation = None
    return replace(checked, distillation=None)


def open_run(saved: SavedRun, cfg: CheckedConfig | None = None) -> tuple[Run, PolicyModule]:
    """Return a saved run, opened to read alone, and its policy with the weights of the checkpoint.

    Args:
        cfg: of `check_run`, if that was called before.

    Raises:
        ConfigError: the config breaks a rule, or the checkpoint holds other parameters or has diverged.
    """
    cfg = cfg or check_run(saved)
    start = saved.start
    run = Run(cfg)
    module = make_policy(run, start)
    check_backbone(saved.checkpoint, start, backbone_id(start))
    if saved.checkpoint is not None:
        load_trainable(module, saved.weights)
        load_reference(module.roles, saved.reference)
        with run.fabric.autocast():
            problem = find_divergence(saved.weights, module.has_finite_logits())
        if problem is not None:
            raise ConfigError(
                f"{saved.checkpoint.path} holds a model that has diverged: {problem}; give an earlier "
                "checkpoint"
            )
        saved.weights.clear()
        saved.reference.clear()
    return run, module
