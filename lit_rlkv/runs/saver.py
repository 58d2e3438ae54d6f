"""Save checkpoints periodically; a failed save is retried after the next iteration."""

import logging

from lightning.fabric import Fabric
from torch import nn

from lit_rlkv.config import as_config_errors
from lit_rlkv.runs.checkpoint import Checkpoint, CheckpointDir, TrainState, trainable_weights
from lit_rlkv.runs.launch import broadcast_from_rank_zero

log = logging.getLogger(__name__)


class Saver:
    """Saves a checkpoint every `every` iterations, and after the last one.

    If a checkpoint cannot be written, as on a full disk, training continues and the next iteration tries
    again.

    Args:
        every: iterations between checkpoints; None saves only the last iteration.
        saved_at: iteration of the newest checkpoint.
        backbone: fingerprint of the frozen weights.
    """

    def __init__(
        self,
        fabric: Fabric,
        module: nn.Module,
        checkpoints: CheckpointDir,
        every: int | None,
        saved_at: int | None,
        backbone: str | None = None,
    ) -> None:
        self.fabric = fabric
        self.module = module
        self.checkpoints = checkpoints
        self.every = every
        self.saved_at = saved_at
        self.backbone = backbone
        self._is_late = False

    def __call__(self, state: TrainState) -> None:
        """Save if a checkpoint is due.

        Raises:
            OSError: the checkpoint of the last iteration cannot be written.
        """
        # Only rank 0 writes, so only it knows of a failed save.
        if not broadcast_from_rank_zero(self.fabric, lambda: self._is_due(state)):
            return
        # Every rank takes part in gathering sharded parameters.
        weights, learner_state = trainable_weights(self.module), state.learner_state()
        if not self.fabric.is_global_zero:
            return
        try:
            self.checkpoints.save(
                state.iteration,
                weights,
                learner_state,
                state.data_state,
                state.metrics,
                self.fabric.world_size,
                self.backbone,
            )
        except OSError as error:
            self._is_late = True
            where = "no checkpoint" if self.saved_at is None else f"that of iteration {self.saved_at}"
            said = f"iteration {state.iteration} cannot be saved in {self.checkpoints.root}: {error}"
            if state.is_last:
                raise OSError(f"{said}; there is {where} to resume from") from error
            log.warning(
                "%s; training continues, and the next iteration tries again; until then there is %s",
                said,
                where,
            )
        else:
            self.saved_at, self._is_late = state.iteration, False

    def _is_due(self, state: TrainState) -> bool:
        is_regular = self.every is not None and state.iteration % self.every == 0
        return (state.is_last or is_regular or self._is_late) and state.iteration != self.saved_at


def latest_checkpoint(checkpoints: CheckpointDir) -> Checkpoint | None:
    """Return the checkpoint to resume from; None without any.

    Raises:
        ConfigError: all checkpoints are broken.
    """
    with as_config_errors(str(checkpoints.root.parent)):
        return checkpoints.latest()
