"""Shadow attention: the learner's attention over exactly the keys that the rollout's cache still held."""

from types import ModuleType
from typing import Any

from torch import Tensor

from lit_rlkv.kernels.backend import with_triton
from lit_rlkv.kernels.shadow_attention import blocks
from lit_rlkv.kernels.shadow_attention.plan import SlotPlan, layer_table, plan_slots
from lit_rlkv.kernels.shadow_attention.tiles import MAX_HEAD_DIM

__all__ = [
    "SlotPlan",
    "layer_table",
    "plan_slots",
    "replayed_attention",
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
    blocks.shadow_attention_with_lse, _load_kernels, chosen_by="query", fits=_fits
)


def replayed_attention(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, sink: Tensor | None = None, **options: Any
) -> Tensor:
    """Return `shadow_attention`, whose softmax also has a logit without a value for each head.

    With a sink s it is out · exp(lse) / (exp(lse) + exp(s)), so that the kernels need no case of their own.

    Args:
        sink: a logit of each query head; None: none. Gradients flow to it.
    """
    if sink is None:
        return shadow_attention(query, key, value, *args, **options)
    out, lse = shadow_attention_with_lse(query, key, value, *args, **options)
    share = (lse - sink.flatten()[:, None]).sigmoid()
    return out * share[..., None].to(out.dtype)
