"""Shadow attention in Triton, registered with autograd, checkpointing and torch.compile."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_rlkv.kernels.backend import in_autocast_dtype, on_tensor_device, register_operation, with_unit_stride
from lit_rlkv.kernels.shadow_attention import launch
from lit_rlkv.kernels.shadow_attention.plan import BLOCK, SlotPlan
from lit_rlkv.kernels.shadow_attention.reference import beside_sink
from lit_rlkv.types import NEVER

MIN_BLOCK = 16
"""Rows of the smallest matrix product in Triton."""

INPUTS = "Tensor query, Tensor key, Tensor value, Tensor evicted_at, Tensor? slot_of"
SETTINGS = "float scaling, float? softcap, SymInt block, SymInt n_slots"


@on_tensor_device
def _launch_forward(
    query: Tensor, key: Tensor, value: Tensor, evicted_at: Tensor, slot_of: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    return launch.forward(launch.Inputs(query, key, value, evicted_at, *settings))


def _empty_outputs(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return launch.by_position(value, query.shape[1]), lse


@on_tensor_device
def _launch_backward(
    d_out: Tensor, d_lse: Tensor, query: Tensor, key: Tensor, value: Tensor, evicted_at: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    slot_of, out, lse, *settings = others
    inputs = launch.Inputs(query, key, value, evicted_at, *settings)
    return launch.backward(inputs, with_unit_stride(d_out), d_lse.contiguous(), out, lse, slot_of)


def _empty_gradients(d_out: Tensor, d_lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(launch.by_position(t, t.shape[1]) for t in inputs[:3])  # query, key and value


_forward = register_operation(
    "shadow_attention_forward",
    f"({INPUTS}, {SETTINGS}) -> (Tensor, Tensor)",
    _launch_forward,
    _empty_outputs,
)
_backward = register_operation(
    "shadow_attention_backward",
    f"(Tensor d_out, Tensor d_lse, {INPUTS}, Tensor out, Tensor lse, {SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _launch_backward,
    _empty_gradients,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling, ctx.softcap, ctx.block, ctx.n_slots = inputs
    ctx.save_for_backward(*tensors, *output)


@once_differentiable
def _gradients(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
    settings = (ctx.scaling, ctx.softcap, ctx.block, ctx.n_slots)
    return (*_backward(d_out, d_lse, *ctx.saved_tensors, *settings), *(None,) * 6)


torch.library.register_autograd("lit_rlkv::shadow_attention_forward", _gradients, setup_context=_save)


def shadow_attention(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, sink: Tensor | None = None, **settings: Any
) -> Tensor:
    """Run the definition's operation in Triton; the output is laid out as [batch seq head dim_v]."""
    out, lse = shadow_attention_with_lse(query, key, value, *args, **settings)
    return out if sink is None else beside_sink(out, lse, sink)


@in_autocast_dtype
def shadow_attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    evicted_at: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    plan: SlotPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the definition's operation in Triton; the log-sum-exp is float32.

    Raises:
        ValueError: the plan was made from a table of another shape, or with blocks too small for the kernels.
    """
    slot_of, block, n_slots = None, BLOCK, 0
    if plan is not None:
        if plan.slot_of.shape != evicted_at.shape:
            raise ValueError(
                f"the plan is for evictions of shape {tuple(plan.slot_of.shape)}, not "
                f"{tuple(evicted_at.shape)}; make it from the table that is replayed, and pass "
                "`plan.layer(i)`"
            )
        if plan.block < MIN_BLOCK:
            raise ValueError(
                f"the plan's block must be at least {MIN_BLOCK} for matrix instructions, got {plan.block}; "
                f"plan with {MIN_BLOCK} or more"
            )
        # Rows of tables start at multiples of 64 bytes, so that loads can be vectorized.
        slot_of, block, n_slots = plan.slot_of.contiguous(), plan.block, -(-plan.n_slots // 16) * 16
    query, key, value = with_unit_stride(query), with_unit_stride(key), with_unit_stride(value)
    evicted_at = evicted_at if evicted_at.dtype == torch.int32 else evicted_at.clamp(max=NEVER).int()
    inputs = (query, key, value, evicted_at.contiguous(), slot_of)
    out, lse = _forward(*inputs, scaling, softcap, block, n_slots)
    return out, lse * math.log(2)  # the kernels compute in base 2
