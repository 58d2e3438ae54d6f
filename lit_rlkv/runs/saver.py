"""Save checkpoints periodically; a failed save is retried after the next iteration."""

import logging
from pathlib import Path

from lightning.fabric import Fabric
from torch import nn
from transformers.utils.hub import cached_file

from lit_rlkv.config import ConfigError, as_config_errors
from lit_rlkv.files import fingerprint
from lit_rlkv.runs.checkpoint import Checkpoint, CheckpointDir, TrainState, trainable_weights
from lit_rlkv.runs.launch import broadcast_from_rank_zero

REWARD_MODEL = "reward_model"
"""Folder in a SFT model for a reward model with weights of its own."""
LOADED = ("*.safetensors", f"{REWARD_MODEL}/*.safetensors")
"""Files that a run loads from its model's folder, which may contain other models or runs."""

log = logging.getLogger(__name__)


class Saver:
    """Saves every so many iterations, and the last moment of the process.

    What cannot be written, as to a full disk, is tried again after the next iteration, and training goes on.

    Args:
        every: iterations; None saves the last moment alone.
        saved_at: iterations that the newest checkpoint has.
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

    def __call__(self, moment: TrainState) -> None:
        """Save if it is time.

        Raises:
            OSError: the last moment cannot be written; says what there is to go on from.
        """
        # The first rank writes, and so knows what could not be written.
        if not broadcast_from_rank_zero(self.fabric, lambda: self._is_due(moment)):
            return
        # Ranks that hold parts of them put them together.
        weights, learner_state = trainable_weights(self.module), moment.learner_state()
        if not self.fabric.is_global_zero:
            return
        try:
            self.checkpoints.save(
                moment.iteration,
                weights,
                learner_state,
                moment.data_state,
                moment.metrics,
                self.fabric.world_size,
                self.backbone,
            )
        except OSError as error:
            self._is_late = True
            where = "no checkpoint" if self.saved_at is None else f"that of iteration {self.saved_at}"
            said = f"iteration {moment.iteration} cannot be saved in {self.checkpoints.root}: {error}"
            if moment.is_last:
                raise OSError(f"{said}; there is {where} to resume from") from error
            log.warning("%s; going on, to be saved after the next one; until then there is %s", said, where)
        else:
            self.saved_at, self._is_late = moment.iteration, False

    def _is_due(self, moment: TrainState) -> bool:
        is_regular = self.every is not None and moment.iteration % self.every == 0
        return (moment.is_last or is_regular or self._is_late) and moment.iteration != self.saved_at


def latest_checkpoint(checkpoints: CheckpointDir) -> Checkpoint | None:
    """The one to go on from; None where there is none yet.

    Raises:
        ConfigError: there are some, and none of them is whole.
    """
    with as_config_errors(str(checkpoints.root.parent)):
        return checkpoints.latest()


def backbone_id(start: str | Path) -> str:
    """Tells the weights of a folder, or of a name on the hub as it lies in the cache, from any others.

    Raises:
        ConfigError: there are no safetensors.
    """
    folder = _folder_of(start)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{start} has no safetensors to know it by; write them by save_pretrained")
    return fingerprint(folder, *LOADED)


def _folder_of(start: str | Path) -> Path:
    if Path(start).is_dir():
        return Path(start)
    config = cached_file(str(start), "config.json")
    assert config is not None  # else it could not have been loaded
    return Path(config).parent


def check_backbone(checkpoint: Checkpoint | None, start: str | Path, fingerprint_now: str) -> None:
    """Check that a checkpoint, which holds only trained parameters, belongs to the weights at `start`.

    Raises:
        ConfigError: the fingerprint of the weights is not the one in the checkpoint.
    """
    if checkpoint is not None and checkpoint.backbone != fingerprint_now:
        raise ConfigError(
            f"{checkpoint.path} was trained on other weights than those in {start}, which have changed "
            "since; bring them back, or start a new run"
        )
