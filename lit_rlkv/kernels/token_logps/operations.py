"""The row kernels as operations that autograd and torch.compile know."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_rlkv.kernels.token_logps import kernel


def _register(
    name: str, schema: str, launch: Callable[..., Any], outputs: Callable[..., Any]
) -> Callable[..., Any]:
    """An operation that torch.compile takes as a whole, since `outputs` tells it the shapes."""
    op = torch.library.custom_op(f"lit_rlkv::{name}", launch, mutates_args=(), schema=schema)
    op.register_fake(outputs)
    return op


_chosen_forward = _register(
    "chosen_forward",
    "(Tensor logits, Tensor tokens, float temperature) -> (Tensor, Tensor, Tensor)",
    kernel.chosen_forward,
    kernel.empty_chosen_outputs,
)
_chosen_backward = _register(
    "chosen_backward",
    "(Tensor upstream, Tensor logits, Tensor tokens, Tensor stats, float temperature) -> Tensor",
    kernel.chosen_backward,
    kernel.empty_chosen_gradient,
)
_kl_forward = _register(
    "kl_forward",
    "(Tensor p_logits, Tensor q_logits, float temperature) -> (Tensor, Tensor)",
    kernel.kl_forward,
    kernel.empty_kl_outputs,
)
_kl_backward = _register(
    "kl_backward",
    "(Tensor upstream, Tensor p_logits, Tensor q_logits, Tensor kl, Tensor stats, float temperature, "
    "bool needs_p, bool needs_q) -> (Tensor, Tensor)",
    kernel.kl_backward,
    kernel.empty_kl_gradients,
)


def _keep_chosen(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, ...]) -> None:
    logits, tokens, ctx.temperature = inputs
    ctx.save_for_backward(logits, tokens, output[2])


def _chosen_gradient(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor, None, None]:
    return _chosen_backward(upstream, *ctx.saved_tensors, ctx.temperature), None, None


def _keep_kl(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    p_logits, q_logits, ctx.temperature = inputs
    ctx.save_for_backward(p_logits, q_logits, *output)


def _kl_gradients(ctx: Any, upstream: Tensor, _: Any) -> tuple[Tensor | None, Tensor | None, None]:
    needs_p, needs_q, _ = ctx.needs_input_grad
    of_p, of_q = _kl_backward(upstream, *ctx.saved_tensors, ctx.temperature, needs_p, needs_q)
    return of_p if needs_p else None, of_q if needs_q else None, None


torch.library.register_autograd("lit_rlkv::chosen_forward", _chosen_gradient, setup_context=_keep_chosen)
torch.library.register_autograd("lit_rlkv::kl_forward", _kl_gradients, setup_context=_keep_kl)


def chosen_logps(
    logits: Float[Tensor, "position vocab"], tokens: Int[Tensor, " position"], temperature: float
) -> Float[Tensor, " position"]:
    """As in `reference`; a token outside of the vocabulary has log-prob NaN."""
    return chosen_logps_and_entropy(logits, tokens, temperature)[0]


def chosen_logps_and_entropy(
    logits: Float[Tensor, "position vocab"], tokens: Int[Tensor, " position"], temperature: float
) -> tuple[Float[Tensor, " position"], Float[Tensor, " position"]]:
    """As in `reference`; the kernel finds both while it reads the logits."""
    logps, entropy, _ = _chosen_forward(logits, tokens, temperature)
    return logps, entropy.detach()


def kl_of_logits(
    p_logits: Float[Tensor, "position vocab"], q_logits: Float[Tensor, "position vocab"], temperature: float
) -> Float[Tensor, " position"]:
    """As in `reference`; exactly 0 where both have the same logits."""
    kl, _ = _kl_forward(p_logits, q_logits, temperature)
    return kl
