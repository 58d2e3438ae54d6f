"""LM head whose logits are float32, computed from operands in the model's 16-bit precision."""

from typing import Any, cast

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from lit_rlkv.kernels.backend import to_autocast_dtype

CHUNK_ELEMENTS = 2**20
"""Weights that a CPU casts to float32 at a time: 4 MiB, which its caches hold."""


class LMHead(nn.Linear):
    """An output head with logits in float32, or in the dtype of its weights if that is wider.

    A bfloat16 logit near 20 is a multiple of 0.125, so one rounding that differs between sampler and learner
    changes a log-prob by that much. The operands stay in 16 bit: their products are exact in float32.
    Autocast decides the dtype of the operands alone.
    """

    cached_weight: Tensor | None = None
    """The weight in `dtype`, within `cache_cast_weights`."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the operands: that of the weight, or of autocast where it is on."""
        (weight,) = to_autocast_dtype(self.weight[:0])
        return weight.dtype

    def forward(self, hidden: Float[Tensor, "*lead dim"]) -> Float[Tensor, "*lead vocab"]:
        dtype = self.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(dtype)
            weight = self.weight if self.cached_weight is None else self.cached_weight
            return logits_of(hidden, weight, self.bias)


def logits_of(
    hidden: Float[Tensor, "*lead dim"],
    weight: Float[Tensor, "vocab dim"],
    bias: Float[Tensor, " vocab"] | None = None,
) -> Float[Tensor, "*lead vocab"]:
    """Return hidden · weightᵀ + bias in float32, or in the dtype of `hidden` if it is wider; gradients flow.

    Args:
        weight: of the same dtype, or float32 that is rounded to a 16-bit `hidden`.
    """
    if hidden.dtype.itemsize > 2:
        return F.linear(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits: Tensor = _Float32Product.apply(rows, weight)  # type: ignore[no-untyped-call]
    logits = logits.view(*hidden.shape[:-1], len(weight))
    return logits if bias is None else logits + bias.float()


def model_body(model: PreTrainedModel) -> nn.Module:
    """Return the model below its head."""
    body: nn.Module = model.base_model
    return model.model if body is model else body  # Llama 4 names its body as that of another class


def use_float32_logits(model: PreTrainedModel) -> None:
    """Turn the output head of a model into an `LMHead`, in place; only if it is a plain `nn.Linear`."""
    head = model.get_output_embeddings()
    # By its class, as FSDP2 does: the module keeps its name, its weight, which may be tied, and its hooks.
    if type(head) is nn.Linear:
        head.__class__ = LMHead


class _Float32Product(torch.autograd.Function):
    """hidden · weightᵀ in float32; the gradients are products in the dtype of `hidden`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return float32_product(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        needs_hidden, needs_weight = ctx.needs_input_grad
        d_hidden = d_weight = None
        with torch.autocast(upstream.device.type, enabled=False):
            upstream = upstream.to(hidden.dtype)
            if needs_hidden:
                d_hidden = upstream @ weight.to(hidden.dtype)
            if needs_weight and weight.dtype == hidden.dtype:
                d_weight = upstream.T @ hidden
            elif needs_weight:  # a float32 weight under autocast
                d_weight = float32_product(upstream.T, hidden.T)
        return d_hidden, d_weight


def float32_product(
    rows: Float[Tensor, "row dim"], weight: Float[Tensor, "column dim"]
) -> Float32[Tensor, "row column"]:
    """Return rows · weightᵀ in float32 from operands in the 16-bit dtype of `rows`.

    CUDA multiplies 16-bit operands into a float32 result. A CPU has no such product: it casts rows and, in
    chunks, the weight, which gives the same exact products, summed in float32.
    """
    if rows.is_cuda:
        return torch.mm(rows, weight.to(rows.dtype).T, out_dtype=torch.float32)
    wide = rows.float()
    products = torch.empty(len(rows), len(weight), dtype=torch.float32, device=rows.device)
    size = max(CHUNK_ELEMENTS // max(weight.shape[1], 1), 1)
    for part, place in zip(torch.split(weight, size), torch.split(products, size, dim=1), strict=True):
        torch.mm(wide, part.to(rows.dtype).float().T, out=place)
    return products
