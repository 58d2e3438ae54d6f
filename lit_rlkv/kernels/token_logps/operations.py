"""The kernels on logits, registered with autograd and torch.compile."""

from typing import Any

import torch
from torch import Tensor

from lit_rlkv.kernels.backend import register_operation
from lit_rlkv.kernels.token_logps import kernel

_chosen_forward = register_operation(
    "chosen_forward",
    "(Tensor logits, Tensor tokens, float temperature) -> (Tensor, Tensor, Tensor)",
    kernel.chosen_forward,
    kernel.empty_chosen_outputs,
)
_chosen_backward = register_operation(
    "chosen_backward",
    "(Tensor upstream, Tensor logits, Tensor tokens, Tensor stats, float temperature) -> Tensor",
    kernel.chosen_backward,
    kernel.empty_chosen_gradient,
)
_kl_forward = register_operation(
    "kl_forward",
    "(Tensor p_logits, Tensor q_logits, float temperature) -> (Tensor, Tensor)",
    kernel.kl_forward,
    kernel.empty_kl_outputs,
)
_kl_backward = register_operation(
    "kl_backward",
    "(Tensor upstream, Tensor p_logits, Tensor q_logits, Tensor kl, Tensor stats, float temperature, "
    "bool needs_p, bool needs_q) -> (Tensor, Tensor)",
    kernel.kl_backward,
    kernel.empty_kl_gradients,
)


def _save_chosen(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, ...]) -> None:
    logits, tokens, ctx.temperature = inputs
    ctx.save_for_backward(logits, tokens, output[2])


def _chosen_gradient(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor, None, None]:
    return _chosen_backward(upstream, *ctx.saved_tensors, ctx.temperature), None, None


def _save_kl(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    p_logits, q_logits, ctx.temperature = inputs
    ctx.save_for_backward(p_logits, q_logits, *output)


def _kl_gradients(ctx: Any, upstream: Tensor, _: Any) -> tuple[Tensor | None, Tensor | None, None]:
    needs_p, needs_q, _ = ctx.needs_input_grad
    d_p, d_q = _kl_backward(upstream, *ctx.saved_tensors, ctx.temperature, needs_p, needs_q)
    return d_p if needs_p else None, d_q if needs_q else None, None


torch.library.register_autograd("lit_rlkv::chosen_forward", _chosen_gradient, setup_context=_save_chosen)
torch.library.register_autograd("lit_rlkv::kl_forward", _kl_gradients, setup_context=_save_kl)


def chosen_logps(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Run `reference.chosen_logps` in Triton; a token outside the vocabulary has log-prob NaN."""
    return chosen_logps_and_entropy(logits, tokens, temperature)[0]


def chosen_logps_and_entropy(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Run `reference.chosen_logps_and_entropy` in Triton, in one pass over the logits."""
    logps, entropy, _ = _chosen_forward(logits, tokens, temperature)
    return logps, entropy.detach()


def kl_of_logits(p_logits: Tensor, q_logits: Tensor, temperature: float) -> Tensor:
    """Run `reference.kl_of_logits` in Triton; exactly 0 for equal logits."""
    kl, _ = _kl_forward(p_logits, q_logits, temperature)
    return kl
