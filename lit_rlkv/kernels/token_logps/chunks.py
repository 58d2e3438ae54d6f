"""Apply a function to positions in chunks, so that the logits of a whole batch never exist at once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
"""Hidden states [position, dim] to logits [position, vocab]."""

TRITON_MAX_CHUNK_LOGITS = 2**27
"""Most logits of one policy per chunk with Triton kernels: 512 MiB in float32.

Each chunk reads the head's weights and, if they train, updates their whole gradient. That moves 8 bytes per
weight in 16 bit, against 2 flops per weight and position: on an H200 both take equally long at about 700
positions per chunk. With a vocabulary of 152,000 a chunk has 883 positions.
"""

ChunkFunction = Callable[..., tuple[Tensor, ...]]
"""Maps tensors [position, ...] to tensors [position]; gradients flow through the first output only."""


def in_chunks(
    function: ChunkFunction, *tensors: Tensor, size: int, stores_gradients: bool
) -> tuple[Tensor, ...]:
    """Apply `function` to `size` positions at a time; logits are not stored for the backward pass.

    Args:
        stores_gradients: compute and store the gradients in the forward pass, instead of recomputing the
            logits in the backward pass. Valid only if nothing but `tensors` needs a gradient.
    """
    if torch.is_grad_enabled():
        function = partial(_store_gradients if stores_gradients else _recompute, function)
    outputs = [function(*chunk) for chunk in zip(*(torch.split(t, size) for t in tensors), strict=True)]
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def check_frozen(is_frozen: bool, *sides: tuple[Head, Tensor]) -> bool:
    """Return `is_frozen`, after a check on zero positions that the logits of frozen heads need no gradient.

    Raises:
        ValueError: a parameter of a frozen head requires a gradient.
    """
    is_checked = is_frozen and torch.is_grad_enabled()
    if is_checked and any(head(hidden[:0].detach()).requires_grad for head, hidden in sides):
        raise ValueError(
            "head_is_frozen (heads_are_frozen) is True, but the head has parameters that require a "
            "gradient and would not get one; leave it False, or freeze the parameters"
        )
    return is_frozen


def _recompute(function: ChunkFunction, *tensors: Tensor) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = checkpoint(function, *tensors, use_reentrant=False)
    return outputs


def _store_gradients(function: ChunkFunction, *tensors: Tensor) -> tuple[Tensor, ...]:
    inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    value, *statistics = function(*inputs)
    trained = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    result = value.detach()
    if value.requires_grad:
        # Each value depends on its own position only, so the gradient of the sum has each value's gradient.
        gradients = torch.autograd.grad(value.sum(), [inputs[i] for i in trained], allow_unused=True)
        for i, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                result = _AttachGradient.apply(result, tensors[i], gradient)  # type: ignore[no-untyped-call]
    return (result, *statistics)


class _AttachGradient(torch.autograd.Function):
    """Returns `value`, with `gradient` as its gradient with respect to the rows of `hidden`."""

    @staticmethod
    def forward(value: Tensor, hidden: Tensor, gradient: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    @once_differentiable  # the gradient is a constant here
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return upstream, (upstream[:, None] * gradient).to(gradient.dtype), None
