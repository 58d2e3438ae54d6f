"""What a warm-up has done so far, kept in the folder of its run, so that a kill does not cost all of it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lightning.fabric import Fabric
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from lit_rlkv.distributed.ranks import FORWARD_COORDINATOR
from lit_rlkv.distributed.sharding import whole
from lit_rlkv.files import atomic_dir
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.runs.checkpoint import CheckpointDir, RetentionPolicy, TrainState
from lit_rlkv.runs.launch import broadcast_from_rank_zero
from lit_rlkv.runs.saver import Saver, newest
from lit_rlkv.runs.starting_model import REWARD_HEAD


class SFTProgress:
    """The finished passes of a warm-up as model folders, and checkpoints of the one under way.

    Args:
        root: of its own for each run.
        every: iterations between checkpoints; None makes none.

    Raises:
        ConfigError: none of the checkpoints is whole.
    """

    def __init__(self, fabric: Fabric, root: Path, every: int | None) -> None:
        self.fabric = fabric
        self.root = root
        self.every = every
        self.checkpoints = CheckpointDir(root / "checkpoints", RetentionPolicy(n_last=1))
        self.resumed = broadcast_from_rank_zero(fabric, lambda: newest(self.checkpoints))

    @property
    def number(self) -> int:
        """Of the pass to go on with."""
        return 0 if self.resumed is None else int(self.resumed.data_state["pass"])

    @property
    def resumed_at(self) -> int:
        """Iterations done, over all passes."""
        return 0 if self.resumed is None else self.resumed.iteration

    def output(self, number: int) -> Path:
        """The model that a pass has left."""
        return self.root / f"pass-{number}"

    def saver(self, module: nn.Module, number: int, n_iterations: int) -> Callable[[TrainState], None]:
        """Saves a pass that ends after so many iterations; not its end, at which it leaves a model."""
        saver = Saver(self.fabric, module, self.checkpoints, self.every, self.resumed_at or None)

        def save(moment: TrainState) -> None:
            if moment.iteration < n_iterations:
                saver(replace(moment, data_state={"pass": number, "data": moment.data_state}))

        return save

    def finish(self, number: int, backbone: PreTrainedModel, head: ScalarHead | None) -> None:
        """Keep what a pass has trained."""
        FORWARD_COORDINATOR.wait()
        # Where layers lie in shards, all ranks put them together for the first.
        weights = {name: whole(value) for name, value in backbone.state_dict().items()}
        if self.fabric.is_global_zero:
            with atomic_dir(self.output(number)) as partial:
                backbone.save_pretrained(partial, state_dict=weights)
                if head is not None:
                    save_file(head.state_dict(), partial / REWARD_HEAD)

    def clear(self) -> None:
        """Nothing of it is needed any more."""
        shutil.rmtree(self.root, ignore_errors=True)
