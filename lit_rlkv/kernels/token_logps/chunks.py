"""Apply a function to positions in chunks, so that the logits of a whole batch never exist at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
"""Hidden states [position, dim] to logits [position, vocab]."""

TRITON_MAX_CHUNK_LOGITS = 2**28
"""Most logits of one policy per chunk with Triton kernels: 512 MiB in 16 bit.

Each chunk reads the head's weights and, if they train, updates their whole gradient. That moves 8 bytes per
weight in 16 bit, against 2 flops per weight and position: on an H200 both take equally long at about 700
positions per chunk. With a vocabulary of 152,000 a chunk has 1766 positions.
"""

OfChunk = Callable[..., tuple[Tensor, ...]]
"""Maps tensors [position, ...] to tensors [position]; gradients flow through the first output only."""


def in_chunks(of_chunk: OfChunk, *tensors: Tensor, size: int, is_linearised: bool) -> tuple[Tensor, ...]:
    """Apply `of_chunk` to `size` positions at a time; logits are not stored for the backward pass.

    Args:
        is_linearised: compute the gradients in the forward pass, while the logits exist, instead of
            recomputing the logits in the backward pass. Valid only if nothing but `tensors` needs a gradient.
    """
    run = _linearised if is_linearised else _recomputed
    chunks = zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
    outputs = [run(of_chunk, *chunk) for chunk in chunks]
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def check_frozen(head: Head, hidden: Tensor) -> None:
    """Check on zero positions that the head's logits need no gradient.

    Raises:
        ValueError: a parameter of the head requires a gradient.
    """
    with torch.enable_grad():
        if head(hidden[:0].detach()).requires_grad:
            raise ValueError(
                "head_is_frozen (heads_are_frozen) is True, but the head has parameters that require a "
                "gradient and would not get one; leave it False, or freeze the parameters"
            )


def _recomputed(of_chunk: OfChunk, *tensors: Tensor) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        return of_chunk(*tensors)
    outputs: tuple[Tensor, ...] = checkpoint(of_chunk, *tensors, use_reentrant=False)
    return outputs


def _linearised(of_chunk: OfChunk, *tensors: Tensor) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        return of_chunk(*tensors)
    inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    value, *statistics = of_chunk(*inputs)
    trained = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    result = value.detach()
    if value.requires_grad:
        # Each value depends on its own position only, so the gradient of the sum has each value's gradient.
        slopes = torch.autograd.grad(value.sum(), [inputs[i] for i in trained], allow_unused=True)
        for i, slope in zip(trained, slopes, strict=True):
            if slope is not None:
                result = _WithSlope.apply(result, tensors[i], slope)  # type: ignore[no-untyped-call]
    return (result, *statistics)


class _WithSlope(torch.autograd.Function):
    """Identity on `value`, whose gradient with respect to each row of `hidden` is that row of `slope`."""

    @staticmethod
    def forward(value: Tensor, hidden: Tensor, slope: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    @once_differentiable  # the slope is a constant here
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        (slope,) = ctx.saved_tensors
        return upstream, (upstream[:, None] * slope).to(slope.dtype), None
