"""Views of TRL's batches and models: whole rows, eviction tables, the model inside of an adapter."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from trl.trainer.utils import use_adapter

from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.shadow_attention import plan_slots


def has_adapter(model: Any) -> bool:
    """Return True if the model is one of peft."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def causal_lm(model: Any) -> PreTrainedModel:
    """Return the transformers model, with the adapters that peft injected."""
    return model.get_base_model() if has_adapter(model) else model


def as_reference(model: Any) -> Any:
    """Switch to the reference within a block, as TRL does: its copy of a trained adapter, or no adapter."""
    return use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)


def attention_arguments(model: Any, evicted_at: Tensor) -> dict[str, Any]:
    """Return what replay passes through the model to its attention."""
    if not uses_triton(next(model.parameters())):
        return {"evicted_at": evicted_at}
    return {"evicted_at": evicted_at, "plan": plan_slots(evicted_at)}


def whole_rows(batch: dict[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Return the tokens of TRL's batch, their mask, and the columns of completions."""
    input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return input_ids, attention_mask, batch["completion_ids"].shape[1]


def pad_columns(evicted_at: Tensor | None, n_columns: int) -> Tensor:
    """Return the table with the columns of TRL's padding, whose keys no query sees."""
    assert evicted_at is not None
    return F.pad(evicted_at, (0, n_columns - evicted_at.shape[-1]))


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
