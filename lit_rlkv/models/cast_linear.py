"""Weights in the dtype of the computation; apart from peft, which sampling does not need."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lit_rlkv.distributed.fsdp import is_sharded
from lit_rlkv.models.lm_head import LMHead


class CastLinear(nn.Module):
    """A linear module without bias that computes in the dtype of a base module."""

    cached_weight: Tensor | None = None
    """The weight in that dtype, within `cache_cast_weights`."""

    def __init__(self, linear: nn.Module, base: nn.Module) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, linear.weight)
        self._base = (base,)  # in a tuple, so that it is not registered as a submodule twice

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the base weights, or the compute dtype if they are quantized."""
        (base,) = self._base
        weight = cast(Tensor, base.weight)
        return weight.dtype if weight.is_floating_point() else cast(torch.dtype, base.compute_dtype)

    def forward(self, x: Float[Tensor, "*lead in"]) -> Float[Tensor, "*lead out"]:
        weight = self.weight.to(self.dtype) if self.cached_weight is None else self.cached_weight
        return F.linear(x.to(self.dtype), weight)


@contextmanager
def cache_cast_weights(backbone: PreTrainedModel) -> Iterator[None]:
    """Cast adapters and LM head once for a `with` block without gradients or updates."""
    # Sharded weights are gathered only during a forward.
    modules = () if is_sharded(backbone) else backbone.modules()
    casts = [module for module in modules if isinstance(module, (CastLinear, LMHead))]
    for module in casts:
        module.cached_weight = module.weight.detach().to(module.dtype)
    try:
        yield
    finally:
        for module in casts:
            module.cached_weight = None
