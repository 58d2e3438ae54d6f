"""CheckpointSaver: gather, check and save the state of a run when a checkpoint is due, or restore it."""

import logging
from typing import Any, Protocol, cast

from lightning import LightningDataModule
from lightning.fabric import Fabric
from torch import nn

from lit_rlkv.config import as_config_errors
from lit_rlkv.models.hydra import Roles
from lit_rlkv.non_finite import NonFiniteError, find_divergence
from lit_rlkv.runs.checkpoint import Checkpoint, CheckpointDir, reference_weights, trainable_weights
from lit_rlkv.runs.launch import broadcast_from_rank_zero
from lit_rlkv.trainer import TrainState

log = logging.getLogger(__name__)


class HasLogits(Protocol):
    """A module that trains; every rank calls `has_finite_logits` before a checkpoint."""

    def has_finite_logits(self) -> bool: ...


class CheckpointSaver:
    """Saves the state of a run as a checkpoint when one is due, and restores that of the one to resume from.

    Args:
        module: an `nn.Module` with `has_finite_logits`; its trained parameters are saved.
        every: iterations between checkpoints; None saves only the last iteration.
        resumed: the checkpoint to resume from; None: from the first iteration.
        backbone: fingerprint of the frozen weights.
        roles: whose reference is saved once it was synced.
    """

    def __init__(
        self,
        fabric: Fabric,
        module: nn.Module,
        checkpoints: CheckpointDir,
        every: int | None,
        resumed: Checkpoint | None,
        backbone: str | None = None,
        roles: Roles | None = None,
    ) -> None:
        self.fabric = fabric
        self.module = module
        self.checkpoints = checkpoints
        self.every = every
        self.resumed = resumed
        self.backbone = backbone
        self.roles = roles
        self.saved_at = None if resumed is None else resumed.iteration
        """Iteration of the newest checkpoint."""
        self._is_late = False

    def load(self, datamodule: LightningDataModule) -> dict[str, Any] | None:
        """Restore parameters and data, and return the learner's state; None without a checkpoint.

        Raises:
            ConfigError: the checkpoint holds other parameters, or the data has changed since.
        """
        if self.resumed is None:
            return None
        self.resumed.load_into(self.module, self.roles)
        with as_config_errors(str(self.resumed.path)):
            datamodule.load_state_dict(self.resumed.data_state)
        return self.resumed.learner_state()

    def save(self, state: TrainState) -> None:
        """Save a checkpoint every `every` iterations, and after the last one, unless training has diverged.

        If it cannot be written, as on a full disk, training continues and the next iteration tries again.

        Raises:
            OSError: the checkpoint of the last iteration cannot be written.
            NonFiniteError: training has diverged; the older checkpoints stay.
        """
        is_regular = self.every is not None and state.iteration % self.every == 0
        is_due = (state.is_last or is_regular or self._is_late) and state.iteration != self.saved_at
        # Only rank 0 writes, so only it knows of a failed save.
        if not broadcast_from_rank_zero(self.fabric, lambda: is_due):
            return
        # Every rank takes part in a forward and in gathering sharded parameters.
        with self.fabric.autocast():
            is_finite = cast(HasLogits, self.module).has_finite_logits()
        weights = trainable_weights(self.module)
        newest = "no checkpoint" if self.saved_at is None else f"that of iteration {self.saved_at}"
        problem = broadcast_from_rank_zero(self.fabric, lambda: find_divergence(weights, is_finite))
        if problem is not None:
            raise NonFiniteError(
                f"training has diverged by iteration {state.iteration}, whose model is not saved: {problem}. "
                f"There is {newest} to go back to; start a new run with a lower learning rate"
            )
        content = weights, state.learner_state(), state.data_state, state.metrics
        reference = {} if self.roles is None else reference_weights(self.roles)
        if not self.fabric.is_global_zero:
            return
        try:
            self.checkpoints.save(state.iteration, *content, self.fabric.world_size, self.backbone, reference)
        except OSError as error:
            self._is_late = True
            said = f"iteration {state.iteration} cannot be saved in {self.checkpoints.root}: {error}"
            if state.is_last:
                raise OSError(f"{said}; there is {newest} to resume from") from error
            log.warning("%s; the next iteration tries again; until then there is %s", said, newest)
        else:
            self.saved_at, self._is_late = state.iteration, False
