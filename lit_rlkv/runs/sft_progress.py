"""The training passes of an SFT stage, and their checkpoints in the run folder."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.fabric import Fabric
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from lit_rlkv.config.schema import SFTConfig
from lit_rlkv.distributed.ranks import FORWARD_COORDINATOR
from lit_rlkv.distributed.sharding import gather_full
from lit_rlkv.files import atomic_dir
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.rng import derive_seed
from lit_rlkv.runs.checkpoint import CheckpointDir, RetentionPolicy, TrainState
from lit_rlkv.runs.launch import broadcast_from_rank_zero
from lit_rlkv.runs.saver import Saver, latest_checkpoint
from lit_rlkv.runs.starting_model import REWARD_HEAD, REWARD_MODEL


@dataclass(frozen=True)
class SFTPass:
    """One training pass over all weights of the backbone."""

    lm_weight: float | int
    reward_weight: float | int
    n_steps: int
    batch_size: int
    n_pairs: int
    seed: int
    """Seed of the problems and of the errors in rejected completions."""
    folder: str = "."
    """Folder below the SFT model's in which its weights are saved."""
    n_answered: int = 0
    """Prompts that the model answers first, for rejected completions; 0: the task corrupts solutions."""


def training_passes(cfg: SFTConfig) -> list[SFTPass]:
    """Return the passes of a config: the LM head with or without the reward head, then a reward model."""
    is_shared = cfg.joint and cfg.n_pairs > 0 and cfg.reward_weight > 0
    first = SFTPass(
        lm_weight=1.0,
        reward_weight=cfg.reward_weight if is_shared else 0.0,
        n_steps=cfg.n_steps,
        batch_size=cfg.batch_size,
        n_pairs=cfg.n_pairs if is_shared else 0,
        seed=cfg.seed,
    )
    passes = [first]
    if not cfg.joint:
        seed = derive_seed(cfg.seed, "prompts", "reward")
        passes.append(SFTPass(0.0, 1.0, cfg.reward_steps, cfg.n_pairs, cfg.n_pairs, seed, REWARD_MODEL))
    pairs = cfg.on_policy_pairs
    if pairs.n_prompts > 0:
        last = SFTPass(
            lm_weight=1.0 if cfg.joint else 0.0,
            reward_weight=pairs.reward_weight,
            n_steps=pairs.n_steps,
            batch_size=cfg.batch_size,
            n_pairs=cfg.batch_size,
            seed=derive_seed(cfg.seed, "prompts", "mistakes"),
            folder="." if cfg.joint else REWARD_MODEL,
            n_answered=pairs.n_prompts,
        )
        passes.append(last)
    return passes


class SFTProgress:
    """The finished passes of an SFT stage as model folders, and checkpoints of the current pass.

    Args:
        root: folder of this stage, a different one for each run.
        every: iterations between checkpoints; None: no checkpoints.

    Raises:
        ConfigError: all checkpoints are broken.
    """

    def __init__(self, fabric: Fabric, root: Path, every: int | None) -> None:
        self.fabric = fabric
        self.root = root
        self.every = every
        self.checkpoints = CheckpointDir(root / "checkpoints", RetentionPolicy(n_last=1))
        self.resumed = broadcast_from_rank_zero(fabric, lambda: latest_checkpoint(self.checkpoints))

    @property
    def number(self) -> int:
        """Number of the pass to resume."""
        return 0 if self.resumed is None else int(self.resumed.data_state["pass"])

    @property
    def resumed_at(self) -> int:
        """Completed iterations of all passes."""
        return 0 if self.resumed is None else self.resumed.iteration

    def output(self, number: int) -> Path:
        """Return the model folder of a finished pass."""
        return self.root / f"pass-{number}"

    def saver(self, module: nn.Module, number: int, n_iterations: int) -> Callable[[TrainState], None]:
        """Return a function that saves checkpoints of a pass, but not its end, which saves a model."""
        saver = Saver(self.fabric, module, self.checkpoints, self.every, self.resumed_at or None)

        def save(state: TrainState) -> None:
            if state.iteration < n_iterations:
                saver(replace(state, data_state={"pass": number, "data": state.data_state}))

        return save

    def finish(self, number: int, backbone: PreTrainedModel, head: ScalarHead | None) -> None:
        """Save the model that a pass has trained."""
        FORWARD_COORDINATOR.wait()
        # Every rank takes part in gathering sharded layers.
        weights = {name: gather_full(value) for name, value in backbone.state_dict().items()}
        if self.fabric.is_global_zero:
            with atomic_dir(self.output(number)) as partial:
                backbone.save_pretrained(partial, state_dict=weights)
                if head is not None:
                    save_file(head.state_dict(), partial / REWARD_HEAD)

    def clear(self) -> None:
        """Remove the folder of the stage."""
        shutil.rmtree(self.root, ignore_errors=True)
