"""Linear layers that are kept in float32 and compute in a backbone's lower precision."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from lit_rlkv.models.backbone import is_sharded


class Cast(nn.Module):
    """A linear module without bias that computes in the precision of another, whatever it reads."""

    rounded: Tensor | None = None
    """Its weight in that precision, while that is kept."""

    def __init__(self, linear: nn.Module, base: nn.Module) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, linear.weight)
        self._base = (base,)  # not as a module: it is one of the model's already

    @property
    def dtype(self) -> torch.dtype:
        """That of the other's weights, which may be widened for a while; quantized ones lie in bytes."""
        (base,) = self._base
        weight = cast(Tensor, base.weight)
        return weight.dtype if weight.is_floating_point() else cast(torch.dtype, base.compute_dtype)

    def forward(self, x: Float[Tensor, "*lead in"]) -> Float[Tensor, "*lead out"]:
        weight = self.weight.to(self.dtype) if self.rounded is None else self.rounded
        return F.linear(x.to(self.dtype), weight)


@contextmanager
def rounding_once(backbone: PreTrainedModel) -> Iterator[None]:
    """A block without gradients or updates, in which adapters are not rounded anew in each forward."""
    casts = [module for module in backbone.modules() if isinstance(module, Cast)]
    # What lies in shards is whole, and may be read, during a forward alone.
    for one in casts if not is_sharded(backbone) else ():
        one.rounded = one.weight.detach().to(one.dtype)
    try:
        yield
    finally:
        for one in casts:
            one.rounded = None
