"""Checkpoints: their weights, how they are written atomically and verified on load, and which are kept."""

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lit_rlkv.checks import from_json
from lit_rlkv.config import ConfigError
from lit_rlkv.distributed.ranks import FORWARD_COORDINATOR
from lit_rlkv.distributed.sharding import gather_full, shard_like
from lit_rlkv.files import atomic_dir, discard, read_json, sweep_partial
from lit_rlkv.models.hydra import Roles

WEIGHTS, LEARNER, STATE = "trainable.safetensors", "optimizer.pt", "state.json"
REFERENCE = "reference.safetensors"
"""Weights of the reference, in checkpoints of runs that have synced it."""
BEST = "best"
"""Link to the best checkpoint by the metric of the retention policy."""
PREFIX = "iteration-"

log = logging.getLogger(__name__)


class BrokenCheckpointError(ConfigError):
    """A checkpoint with a missing or changed file."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was verified."""

    path: Path
    iteration: int
    data_state: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last iteration."""
    n_ranks: int = 1
    """Number of processes of the run."""
    backbone: str | None = None
    """Fingerprint of the frozen weights, which are saved elsewhere; None if all weights are trained."""
    files: dict[str, str] = field(default_factory=dict)
    """Digests of the files by name."""

    def weights(self) -> dict[str, Tensor]:
        """Load the trained parameters by name."""
        return load_file(self.path / WEIGHTS)

    def reference(self) -> dict[str, Tensor]:
        """Load the parameters of the reference by name; empty while it is the starting model."""
        return load_file(self.path / REFERENCE) if REFERENCE in self.files else {}

    def load_into(self, module: nn.Module, roles: Roles | None = None) -> None:
        """Copy the parameters into a module, and those of the reference into its roles.

        Raises:
            ConfigError: names or shapes differ.
        """
        load_trainable(module, self.weights())
        if roles is not None:
            load_reference(roles, self.reference())

    def learner_state(self) -> dict[str, Any]:
        """Load the state of optimizers and schedulers."""
        state: dict[str, Any] = torch.load(self.path / LEARNER, weights_only=True, map_location="cpu")
        return state


@dataclass(frozen=True)
class RetentionPolicy:
    """The checkpoints to keep: the newest, and the best by a metric of their iteration."""

    n_last: int = 2
    n_best: int = 0
    metric: str = "reward"
    mode: str = "max"
    """max or min."""

    def best(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """Return the best checkpoints that have the metric, best first; of equal ones, the newer first."""
        sign = 1 if self.mode == "max" else -1
        judged = [one for one in checkpoints if not math.isnan(one.metrics.get(self.metric, math.nan))]
        if checkpoints and not judged and self.n_best > 0:
            log.warning("no checkpoint has the metric %r to choose the best by", self.metric)
        ranked = sorted(
            judged, key=lambda one: (sign * one.metrics[self.metric], one.iteration), reverse=True
        )
        return ranked[: self.n_best]


class CheckpointDir:
    """The checkpoints of a run; one process at a time may write them."""

    def __init__(self, root: Path, retention: RetentionPolicy | None = None) -> None:
        self.root = root
        self.retention = retention or RetentionPolicy()

    def save(
        self,
        iteration: int,
        weights: Mapping[str, Tensor],
        learner_state: dict[str, Any],
        data_state: dict[str, Any],
        metrics: Mapping[str, float] | None = None,
        n_ranks: int = 1,
        backbone: str | None = None,
        reference: Mapping[str, Tensor] | None = None,
    ) -> Path:
        """Write a checkpoint under another name, sync, then rename: a kill leaves the older ones intact.

        Raises:
            OSError: the checkpoint cannot be written, as on a full disk; its partial files are removed.
        """
        sweep_partial(self.root, PREFIX)
        target = self.folder_of(iteration)
        with atomic_dir(target) as partial:
            tensors = {WEIGHTS: weights} | ({REFERENCE: reference} if reference else {})
            for file, values in tensors.items():
                save_file({name: value.contiguous().cpu() for name, value in values.items()}, partial / file)
            torch.save(learner_state, partial / LEARNER)
            state = {
                "iteration": iteration,
                "data": data_state,
                "metrics": dict(metrics or {}),
                "n_ranks": n_ranks,
                "backbone": backbone,
                "files": {name: digest(partial / name) for name in (*tensors, LEARNER)},
            }
            (partial / STATE).write_text(json.dumps(state | {"digest": _digest_of(state)}))
        self._tidy(iteration)
        return target

    def _tidy(self, iteration: int) -> None:
        """Remove checkpoints that are not kept, and link the best.

        A checkpoint newer than the one just saved is from before the run was resumed at an older one.
        """
        found = [checkpoint for path in self.all() if (checkpoint := _read(path)) is not None]
        older = [one for one in found if one.iteration <= iteration]
        best = self.retention.best(older)
        kept = {one.path for one in (*older[-self.retention.n_last :], *best)}
        for one in found:
            if one.path not in kept:
                discard(one.path)
        if best:
            link, new = self.root / BEST, self.root / f".{BEST}.partial"
            new.unlink(missing_ok=True)
            try:
                new.symlink_to(best[0].path.name)
                os.replace(new, link)
            except OSError as error:
                log.warning("no link to the best checkpoint, %s: %s", best[0].path.name, error)

    def folder_of(self, iteration: int) -> Path:
        """Return the folder of an iteration's checkpoint; names sort by iteration."""
        return self.root / f"{PREFIX}{iteration:06d}"

    def named(self, name: str) -> Path:
        """Return the folder of a checkpoint by its name, such as best; iteration-50 may lack its zeros.

        Raises:
            ConfigError: there is none of that name; the error names the newest.
        """
        number = re.fullmatch(f"{PREFIX}([0-9]{{1,9}})", name)
        for folder in (self.root / name, *([] if number is None else [self.folder_of(int(number[1]))])):
            if folder.is_dir():
                return folder
        newest = ", ".join(path.name for path in self.all()[-2:]) or "none"
        raise ConfigError(f"{self.root} has no checkpoint {name}; the newest are: {newest}")

    def all(self) -> list[Path]:
        """Return all checkpoint folders, oldest first, also broken ones."""
        return sorted(path for path in self.root.glob(f"{PREFIX}*") if path.is_dir())

    def latest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, None without any; warn about broken ones.

        The run may be training and removing checkpoints meanwhile.

        Raises:
            ConfigError: all checkpoints are broken, the newest cannot be read, or `root` is no folder.
        """
        if os.path.lexists(self.root) and not self.root.is_dir():
            raise BrokenCheckpointError(
                f"{self.root} must be a folder; remove it, or restore the checkpoints"
            )
        paths = self.all()
        for path in reversed(paths):
            try:
                return load_checkpoint(path)
            except (BrokenCheckpointError, OSError) as error:
                if not path.is_dir():  # removed meanwhile, so there is a newer one
                    return self.latest()
                if isinstance(error, OSError):
                    raise ConfigError(f"{path} cannot be read: {error}") from error
                log.warning("looking for an older checkpoint: %s", error)
        if paths:
            raise BrokenCheckpointError(
                f"all {len(paths)} checkpoints in {self.root} are broken; restore one, or remove the folder "
                "to start training again"
            )
        return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint folder after comparing the digest of every file.

    Raises:
        FileNotFoundError: the folder holds no checkpoint.
        BrokenCheckpointError: a file is missing or changed.
    """
    if path.is_symlink():  # the link to the best may change while this one is read
        path = path.resolve()
    is_one_by_name = path.is_dir() and path.name.startswith(PREFIX)
    if not is_one_by_name and not (path / STATE).is_file():
        raise FileNotFoundError(
            f"{path} holds no checkpoint ({STATE} is missing); give a folder named {PREFIX}..."
        )
    checkpoint = _read(path)
    if checkpoint is None:
        raise _broken(path / STATE)
    for name, expected in checkpoint.files.items():
        if not (path / name).is_file() or digest(path / name) != expected:
            raise _broken(path / name)
    return checkpoint


def _broken(file: Path) -> BrokenCheckpointError:
    why = "has changed since it was written" if file.is_file() else "is missing"
    return BrokenCheckpointError(f"{file} {why}; another checkpoint of the run may be intact")


def _read(path: Path) -> Checkpoint | None:
    """Read the state file of a checkpoint; None if it is missing or changed."""
    try:
        state: dict[str, Any] = read_json(path / STATE)
        is_intact = state.pop("digest") == _digest_of(state)
        found = from_json(Checkpoint, {"path": path, "data_state": state.pop("data"), **state})
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    # Names of files elsewhere, such as of a device, are not written here.
    is_known = {*found.files} - {REFERENCE} == {WEIGHTS, LEARNER}
    return found if is_intact and is_known else None


def digest(path: Path) -> str:
    """Return the BLAKE2 digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest_of(state: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


def trainable_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters by name, sharded ones gathered on rank 0.

    Every rank must call it. The frozen backbone is saved once, elsewhere.
    """
    return _gathered(_parameters(module, trained=True))


def reference_weights(roles: Roles) -> dict[str, Tensor]:
    """Return the reference's parameters as `trainable_weights`; empty while it is the starting model."""
    if not roles.reference_is_synced:
        return {}
    return _gathered(_parameters(roles.backbone("reference"), trained=False))


def load_trainable(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy saved parameters into the trained parameters of a module.

    Raises:
        ConfigError: names or shapes differ.
    """
    _load(_parameters(module, trained=True), weights, "trained parameters")


def load_reference(roles: Roles, weights: Mapping[str, Tensor]) -> None:
    """Copy saved parameters into the reference; do nothing without any, or if no role is the reference.

    Raises:
        ConfigError: names or shapes differ.
    """
    if weights and "reference" in roles.needed:
        _load(_parameters(roles.backbone("reference"), trained=False), weights, "reference")
        roles.reference_is_synced = True


def _parameters(module: nn.Module, *, trained: bool) -> dict[str, nn.Parameter]:
    FORWARD_COORDINATOR.wait()  # those of a gathered layer are copies, and writes to them would be lost
    return {name: one for name, one in module.named_parameters() if one.requires_grad == trained}


def _gathered(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: gather_full(parameter.detach()) for name, parameter in parameters.items()}


def _load(own: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor], name_of_all: str) -> None:
    if own.keys() != weights.keys():
        odd = sorted(own.keys() ^ weights.keys())
        raise ConfigError(
            f"the checkpoint must hold this model's {name_of_all}, but {len(odd)} differ, such as "
            f"{odd[0]}; give the roles that it was trained with"
        )
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            raise ConfigError(
                f"{name} has shape {tuple(weights[name].shape)} in the checkpoint but "
                f"{tuple(parameter.shape)} here; give the model and the roles.rank that it was trained with"
            )
        parameter.data.copy_(shard_like(weights[name], parameter))
