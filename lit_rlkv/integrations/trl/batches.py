"""Views of TRL's batches and models: rows with their rollout, the model inside of an adapter."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trl.trainer.utils import use_adapter

from lit_rlkv.kernels.token_logps import TokenSets
from lit_rlkv.types import Record, Rollout

RolloutRow = tuple[Rollout, int]
"""A rollout and the number of a row. TRL shuffles and splits a list of these as the tensors of its batch."""


def has_adapter(model: Any) -> bool:
    """Return True if the model is one of peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def causal_lm(model: Any) -> PreTrainedModel:
    """Return the transformers model, with the adapters that peft injected."""
    return model.get_base_model() if has_adapter(model) else model


def as_reference(model: Any) -> Any:
    """Switch to the reference within a block, as TRL does: its copy of a trained adapter, or no adapter."""
    return use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)


def whole_rows(batch: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Return the tokens of TRL's batch, their mask, and the columns of completions."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return input_ids, attention_mask, batch["completion_ids"].shape[1]


def rollout_of(rows: list[RolloutRow]) -> Rollout:
    """Return the rows of one rollout as a batch."""
    rollout = rows[0][0]
    return rollout.rows(torch.tensor([row for _, row in rows], device=rollout.input_ids.device))


def view_of(rollout: Rollout, attention_mask: Tensor, *, shadow: bool) -> Record:
    """Return what a forward replays; without the evictions it goes by TRL's mask."""
    return rollout.record.view(rollout.attention_mask if shadow else attention_mask.bool(), shadow=shadow)


def token_sets(rollout: Rollout, is_read: Tensor) -> TokenSets | None:
    """Return the tokens that each read token was chosen from; None: the whole vocabulary.

    Args:
        is_read: True on all tokens of a completion, or on none where TRL leaves it out.
    """
    if rollout.record.sampling_masks is None:
        return None
    masks = rollout.record.sampling_masks.rows(is_read.any(dim=1))
    return TokenSets(masks.counts[masks.counts > 0], masks.token_ids)


@contextmanager
def replaced_states(decoder: Any, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block, the decoder returns `replace` of its last hidden states."""

    def hook(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = replace(output.last_hidden_state)
        return output

    handle = decoder.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
