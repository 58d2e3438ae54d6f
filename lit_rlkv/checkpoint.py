"""Checkpoints of a run: what training changes, written whole or not at all, and how to load it again."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

WEIGHTS, OPTIMIZER, STATE = "trainable.safetensors", "optimizer.pt", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """One saved moment of a run."""

    path: Path
    iteration: int
    data_state: dict[str, Any]

    def weights(self) -> dict[str, Tensor]:
        """The parameters that training changed, by name."""
        return load_file(self.path / WEIGHTS)

    def optimizer_state(self) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(self.path / OPTIMIZER, weights_only=True)
        return state


class CheckpointDir:
    """The checkpoints of one run, the newest `keep` of them."""

    def __init__(self, root: Path, keep: int = 2) -> None:
        self.root = root
        self.keep = keep

    def save(
        self,
        iteration: int,
        weights: dict[str, Tensor],
        optimizer_state: dict[str, Any],
        data_state: dict[str, Any],
    ) -> Path:
        """Write under a temporary name, then rename: a kill at any moment leaves the older checkpoints."""
        self.root.mkdir(parents=True, exist_ok=True)
        target = self.root / f"iteration-{iteration:06d}"
        partial = self.root / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_file({name: value.contiguous().cpu() for name, value in weights.items()}, partial / WEIGHTS)
        torch.save(optimizer_state, partial / OPTIMIZER)
        (partial / STATE).write_text(json.dumps({"iteration": iteration, "data": data_state}))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        for old in self.all()[: -self.keep]:
            shutil.rmtree(old)
        return target

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path for path in self.root.glob("iteration-*") if (path / STATE).is_file())

    def latest(self) -> Checkpoint | None:
        paths = self.all()
        return load_checkpoint(paths[-1]) if paths else None


def load_checkpoint(path: Path) -> Checkpoint:
    """Open one checkpoint folder.

    Raises:
        FileNotFoundError: the folder holds no complete checkpoint.
    """
    if not (path / STATE).is_file():
        raise FileNotFoundError(
            f"{path} holds no checkpoint ({STATE} is missing); give a folder named iteration-..."
        )
    state = json.loads((path / STATE).read_text())
    return Checkpoint(path=path, iteration=state["iteration"], data_state=state["data"])


def load_trainable(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put saved parameters into a module that has the same ones to train.

    Raises:
        ValueError: names or shapes differ, so the checkpoint belongs to another layout.
    """
    own = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if own.keys() != weights.keys():
        odd = sorted(own.keys() ^ weights.keys())
        raise ValueError(
            f"the checkpoint's parameters are not this model's, {len(odd)} differ, such as {odd[0]}"
        )
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(weights[name].shape)} in the checkpoint but "
                f"{tuple(parameter.shape)} here; was it trained with another LoRA rank?"
            )
        parameter.data.copy_(weights[name])
