"""The attention function registered with transformers: slot pool, replay of deaths, or plain SDPA."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lit_rlkv.kernels.shadow_attention import shadow_attention
from lit_rlkv.kvcache import SlotCache

ATTENTION_NAME = "lit_rlkv"

NOT_REPLAYED = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments by which some models change the softmax; what we do not compute we refuse."""


def attention_forward(
    module: nn.Module,
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head slot dim"],
    value: Float[Tensor, "batch kv_head slot dim_v"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    slot_cache: SlotCache | None = None,
    death: Int[Tensor, "batch layer #kv_head seq"] | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch seq head dim_v"], None]:
    """Attention of one layer, as transformers calls it; never with dropout.

    With `slot_cache` the keys go into that pool; with `death` the sampler's view of this layer is replayed (a
    table of one layer or one KV head serves all of them); with neither it is transformers' own SDPA.
    """
    if slot_cache is None and death is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name in NOT_REPLAYED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name!r} to its attention, which is not replayed"
            )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    if slot_cache is not None:
        out = slot_cache.slot_layers[layer].attend(query, key, value, scaling)
    else:
        assert death is not None
        layer_death = death[:, layer if death.shape[1] > 1 else 0]
        out = shadow_attention(query, key, value, layer_death, scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def no_mask(device: torch.device) -> Tensor:
    """A stand-in that transformers takes for a finished 4-D mask, so that it builds none of its own."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
