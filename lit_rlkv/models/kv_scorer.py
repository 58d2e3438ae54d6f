"""The scorer of a trained eviction policy on a backbone: added, read, saved and loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlkv.kernels.backend import use_kernels
from lit_rlkv.kvcache.policies import Learned
from lit_rlkv.kvcache.policy import Policy
from lit_rlkv.kvcache.scorer import KVShape
from lit_rlkv.models.attention import AttentionInputs
from lit_rlkv.models.backbone import dense_states
from lit_rlkv.models.model_files import find_file

KV_SCORER = "kv_scorer"
"""Name of the module on a backbone."""
KV_SCORER_FILE = "kv_scorer.safetensors"
"""File with its weights in the folder of an exported model."""


def kv_scorer_of(model: nn.Module) -> nn.Module | None:
    """Return the scorer of a backbone; None without one."""
    return dict(model.named_children()).get(KV_SCORER)


def add_kv_scorer(
    model: PreTrainedModel, policy: Policy, weights: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """Add the scorer of a trained policy to a prepared backbone, in float32 or higher, and return it.

    The sizes of all layers are read off a forward of two tokens.

    Raises:
        ValueError: the weights are of a scorer with other sizes.
    """
    scorer = policy.make_scorer(_shapes(model))
    if weights is not None:
        try:
            scorer.load_state_dict(dict(weights))
        except RuntimeError as error:
            raise ValueError(
                f"the weights of the kv_scorer must be of a scorer for {type(model).__name__}, with the same "
                f"policy_options: {error}"
            ) from error
    scorer.to(device=model.device, dtype=torch.promote_types(model.dtype, torch.float32))
    model.add_module(KV_SCORER, scorer)
    return scorer


@torch.no_grad()
def _shapes(model: PreTrainedModel) -> list[KVShape]:
    found: dict[int, KVShape] = {}

    def look(inputs: AttentionInputs) -> None:
        found[inputs.layer] = KVShape(inputs.key.shape[1], inputs.key.shape[3], inputs.value.shape[3])

    with use_kernels("reference"):
        dense_states(model, torch.zeros((1, 2), dtype=torch.long, device=model.device), probe=look)
    return [found[layer] for layer in sorted(found)]


def split_kv_scorer(weights: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """Remove the scorer's parameters from those of a run, and return them; None without any."""
    names = {name: name.partition(f".{KV_SCORER}.")[2] for name in weights}
    return {own: weights.pop(name) for name, own in names.items() if own} or None


def save_kv_scorer(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the weights of a scorer into a folder."""
    plain = {name: value.detach().contiguous().cpu() for name, value in weights.items()}
    save_file(plain, folder / KV_SCORER_FILE)


def read_kv_scorer(model: str | Path) -> dict[str, Tensor] | None:
    """Return the weights of a scorer in a folder, or of a hub name; None without any.

    Raises:
        ValueError: the file is damaged.
    """
    path = find_file(model, KV_SCORER_FILE)
    try:
        return None if path is None else load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); export the model again") from error


def load_kv_scorer(model: PreTrainedModel, folder: str | Path, policy: Policy | None = None) -> nn.Module:
    """Add the scorer that an export has written to a prepared backbone, for `CacheSpec("learned", ...)`.

    Args:
        policy: a trained policy of your own; None: `Learned`, with as many hidden units as the file has.

    Raises:
        ValueError: the folder has no scorer, or one of another model or policy.
    """
    weights = read_kv_scorer(folder)
    if weights is None:
        raise ValueError(f"{folder} must hold {KV_SCORER_FILE}, found none; export a run of a trained policy")
    if policy is None:
        options: dict[str, Any] = {}
        if "layers.0.bias" in weights:
            options["hidden"] = weights["layers.0.bias"].shape[1]
        policy = Learned(**options)
    return add_kv_scorer(model, policy, weights)
