"""Shadow attention: the learner's attention over exactly the keys that the rollout's cache still held."""

from types import ModuleType
from typing import Any

from torch import Tensor

from lit_rlkv.kernels.backend import with_triton
from lit_rlkv.kernels.shadow_attention import blocks, reference
from lit_rlkv.kernels.shadow_attention.plan import SlotPlan, layer_table, plan_slots
from lit_rlkv.kernels.shadow_attention.tiles import MAX_HEAD_DIM

__all__ = [
    "SlotPlan",
    "layer_table",
    "plan_slots",
    "shadow_attention",
    "shadow_attention_with_lse",
]


def _load_kernels() -> ModuleType:
    from lit_rlkv.kernels.shadow_attention import ops

    return ops


def _fits(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> bool:
    return max(query.shape[-1], value.shape[-1]) <= MAX_HEAD_DIM


shadow_attention = with_triton(blocks.shadow_attention, _load_kernels, chosen_by="query", fits=_fits)
shadow_attention_with_lse = with_triton(
    reference.shadow_attention_with_lse, _load_kernels, chosen_by="query", fits=_fits
)
