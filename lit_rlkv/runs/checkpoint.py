"""Checkpoints of a run: what training changes, written whole or not at all, and how to load it again."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lit_rlkv.distributed.ranks import FORWARD_COORDINATOR
from lit_rlkv.distributed.sharding import gather_full, shard_like
from lit_rlkv.files import atomic_dir, discard, sweep_partial

WEIGHTS, LEARNER, STATE = "trainable.safetensors", "optimizer.pt", "state.json"
BEST = "best"
"""Link to the best checkpoint, where there is a metric to judge by."""
PREFIX = "iteration-"
MODES = ("max", "min")

log = logging.getLogger(__name__)


class BrokenCheckpointError(ValueError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class TrainState:
    """The state of training between two iterations: with the parameters, all that a checkpoint needs."""

    iteration: int
    """Iterations done."""
    metrics: Mapping[str, float]
    """Metrics of the last iteration; empty before the first."""
    data_state: dict[str, Any]
    learner_state: Callable[[], dict[str, Any]]
    is_last: bool
    """True if this process trains no further."""


@dataclass(frozen=True)
class Checkpoint:
    """One saved moment of a run."""

    path: Path
    iteration: int
    data_state: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of its last iteration."""
    n_ranks: int = 1
    """Processes that the run had."""
    backbone: str | None = None
    """Fingerprint of the weights that it stands on, which are not in it; None where all of them are."""

    def weights(self) -> dict[str, Tensor]:
        """The parameters that training changed, by name."""
        return load_file(self.path / WEIGHTS)

    def learner_state(self) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(self.path / LEARNER, weights_only=True, map_location="cpu")
        return state


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints stay: the newest, and the best by a metric of their iteration.

    Raises:
        ValueError: nothing would stay, or a mode that does not exist.
    """

    n_last: int = 2
    n_best: int = 0
    metric: str = "reward"
    mode: str = "max"

    def __post_init__(self) -> None:
        if self.n_last < 1 or self.n_best < 0:
            raise ValueError(
                f"n_last={self.n_last}, n_best={self.n_best}: a run goes on from its last checkpoint; give "
                "n_last of at least 1 and n_best of at least 0"
            )
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is unknown; choose one of {', '.join(MODES)}")

    def best(self, checkpoints: list[Checkpoint]) -> list[Checkpoint]:
        """The best of those that have the metric, the best first and the newer of equals before the older."""
        sign = 1 if self.mode == "max" else -1
        judged = [one for one in checkpoints if not math.isnan(one.metrics.get(self.metric, math.nan))]
        if checkpoints and not judged and self.n_best > 0:
            log.warning("no checkpoint has the metric %r to choose the best by", self.metric)
        ranked = sorted(
            judged, key=lambda one: (sign * one.metrics[self.metric], one.iteration), reverse=True
        )
        return ranked[: self.n_best]


class CheckpointDir:
    """The checkpoints of one run, which one process at a time may write."""

    def __init__(self, root: Path, keeping: RetentionPolicy | None = None) -> None:
        self.root = root
        self.keeping = keeping or RetentionPolicy()

    def save(
        self,
        iteration: int,
        weights: Mapping[str, Tensor],
        learner_state: dict[str, Any],
        data_state: dict[str, Any],
        metrics: Mapping[str, float] | None = None,
        n_ranks: int = 1,
        backbone: str | None = None,
    ) -> Path:
        """Write it under another name, wait for the disk, rename: a kill at any moment leaves the older ones.

        Raises:
            OSError: it cannot be written, such as to a full disk; nothing is left of it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        sweep_partial(self.root, PREFIX)
        target = self.folder_of(iteration)
        with atomic_dir(target) as partial:
            save_file({name: value.contiguous().cpu() for name, value in weights.items()}, partial / WEIGHTS)
            torch.save(learner_state, partial / LEARNER)
            state = {
                "iteration": iteration,
                "data": data_state,
                "metrics": dict(metrics or {}),
                "n_ranks": n_ranks,
                "backbone": backbone,
                "files": {name: digest(partial / name) for name in (WEIGHTS, LEARNER)},
            }
            (partial / STATE).write_text(json.dumps(state | {"digest": _digest_of(state)}))
        self._tidy(iteration)
        return target

    def _tidy(self, iteration: int) -> None:
        """Remove what need not be kept, and point to the best.

        What claims to be newer than the iteration just saved is from before a step back, or damaged.
        """
        found = [_checkpoint(path, state) for path in self.all() if (state := _state_of(path)) is not None]
        for one in found:
            if one.iteration > iteration:
                discard(one.path)
        readable = [one for one in found if one.iteration <= iteration]
        best = self.keeping.best(readable)
        kept = {one.path for one in (*readable[-self.keeping.n_last :], *best)}
        for one in readable:
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
        """Where the checkpoint of an iteration is, or would be; names are in the order of iterations."""
        return self.root / f"{PREFIX}{iteration:06d}"

    def all(self) -> list[Path]:
        """Checkpoints by name, oldest first, whole or not."""
        return sorted(path for path in self.root.glob(f"{PREFIX}*") if path.is_dir())

    def latest(self) -> Checkpoint | None:
        """The last whole checkpoint, None where there is none; says which broken ones it passed over.

        It may be asked while the run trains, and so discards checkpoints.

        Raises:
            BrokenCheckpointError: there are checkpoints, and none of them is whole.
        """
        paths = self.all()
        for path in reversed(paths):
            try:
                return load_checkpoint(path)
            except (BrokenCheckpointError, OSError) as error:
                if not path.is_dir():  # discarded meanwhile, for there is a newer one
                    return self.latest()
                if isinstance(error, OSError):
                    raise
                log.warning("looking for an older checkpoint: %s", error)
        if paths:
            raise BrokenCheckpointError(
                f"none of the {len(paths)} checkpoints in {self.root} is whole; bring one back, or remove "
                "the folder to begin training anew"
            )
        return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Open one checkpoint folder, after a look at every byte of it.

    Raises:
        FileNotFoundError: the folder holds no checkpoint.
        BrokenCheckpointError: it is not what was written.
    """
    if path.is_symlink():  # to the best, of which there may be a new one while this one is read
        path = path.resolve()
    is_one_by_name = path.is_dir() and path.name.startswith(PREFIX)
    if not is_one_by_name and not (path / STATE).is_file():
        raise FileNotFoundError(
            f"{path} holds no checkpoint ({STATE} is missing); give a folder named {PREFIX}..."
        )
    state = _state_of(path)
    if state is None:
        raise _broken(path / STATE)
    for name, expected in state["files"].items():
        if not (path / name).is_file() or digest(path / name) != expected:
            raise _broken(path / name)
    return _checkpoint(path, state)


def _broken(file: Path) -> BrokenCheckpointError:
    why = "is not the file that was written" if file.is_file() else "is missing"
    return BrokenCheckpointError(f"{file} {why}; another checkpoint of the run may be whole")


def _state_of(path: Path) -> dict[str, Any] | None:
    """Return the state file of a checkpoint; None if it is not what was written."""
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text())
        is_whole = state.pop("digest") == _digest_of(state)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return state if is_whole else None


def _checkpoint(path: Path, state: dict[str, Any]) -> Checkpoint:
    return Checkpoint(
        path=path,
        iteration=state["iteration"],
        data_state=state["data"],
        metrics=state["metrics"],
        n_ranks=state["n_ranks"],
        backbone=state["backbone"],
    )


def digest(path: Path) -> str:
    """BLAKE2 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest_of(state: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()


def trainable_weights(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes, by name; a frozen backbone is saved once, elsewhere.

    Of layers that lie in shards the first rank gets all; all ranks must ask.
    """
    FORWARD_COORDINATOR.wait()
    return {name: gather_full(p.detach()) for name, p in module.named_parameters() if p.requires_grad}


def load_trainable(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put saved parameters into a module that has the same ones to train.

    Raises:
        ValueError: names or shapes differ, so the checkpoint belongs to another layout.
    """
    FORWARD_COORDINATOR.wait()  # no layer may be whole, for what is written to that is lost
    own = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if own.keys() != weights.keys():
        odd = sorted(own.keys() ^ weights.keys())
        raise ValueError(
            f"the checkpoint's parameters are not this model's, {len(odd)} differ, such as {odd[0]}; give "
            "the roles that it was trained with"
        )
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(weights[name].shape)} in the checkpoint but "
                f"{tuple(parameter.shape)} here; give the model and the roles.rank that it was trained with"
            )
        parameter.data.copy_(shard_like(weights[name], parameter))
