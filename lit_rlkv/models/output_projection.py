"""The output projection W_o of each attention layer, as it computes now."""

from functools import partial
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rlkv.distributed.fsdp import is_sharded
from lit_rlkv.kvcache.value_norms import Projection
from lit_rlkv.models.backbone import layer_kinds


def output_projections(model: PreTrainedModel) -> tuple[Projection, ...]:
    """Return W_oᵀ of each layer with attention, computed when it is called for.

    Empty if a layer has no `o_proj`, or if weights are sharded: they are gathered in the forward only.
    """
    found = {
        cast(int, module.layer_idx): cast(nn.Module, module.o_proj)
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "o_proj")
    }
    attending = [number for number, kind in enumerate(layer_kinds(model)) if kind.attends]
    if is_sharded(model) or not found.keys() >= set(attending):
        return ()
    return tuple(partial(_weight, found[number], model.dtype, model.device) for number in attending)


@torch.no_grad()
def _weight(linear: nn.Module, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "head_dim hidden"]:
    """Return a plain weight, or what a layer makes of unit vectors: so adapters and 4-bit codes are in it."""
    if type(linear) is nn.Linear:
        return linear.weight.T
    units = torch.eye(cast(int, linear.in_features), dtype=dtype, device=device)
    return cast(Tensor, linear(units) - linear(torch.zeros_like(units[:1])))  # less its bias
