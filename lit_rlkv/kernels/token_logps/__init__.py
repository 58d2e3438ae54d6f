"""Log-probs of chosen tokens and KL of two policies, without the logits of a whole batch."""

from types import ModuleType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.token_logps import chunks, reference
from lit_rlkv.kernels.token_logps.chunks import Head, check_frozen, in_chunks
from lit_rlkv.kernels.token_logps.reference import tempered

__all__ = ["Head", "in_chunks", "policy_kl", "tempered", "token_logps", "token_logps_and_entropy"]


def token_logps(
    hidden: Float[Tensor, "position dim"],
    head: Head,
    tokens: Int[Tensor, " position"],
    temperature: float,
    vocab_size: int,
    *,
    head_is_frozen: bool = False,
    kernels: str | None = None,
) -> Float[Tensor, " position"]:
    """Log-prob of each token under softmax(head(hidden) / temperature), in nats.

    Args:
        head_is_frozen: only `hidden` needs a gradient. It is then found in the forward pass, which costs
            another [position, dim] until the backward pass and saves computing the logits twice.

    Raises:
        ValueError: the head is called frozen, and its parameters require a gradient.
    """
    rows, max_logits = _implementation(hidden, kernels)
    (logps,) = in_chunks(
        lambda hidden, tokens: (rows.chosen_logps(head(hidden), tokens, temperature),),
        hidden,
        tokens,
        size=max(max_logits // vocab_size, 1),
        is_linearised=_is_linearised(head_is_frozen, (head, hidden)),
    )
    return logps


def token_logps_and_entropy(
    hidden: Float[Tensor, "position dim"],
    head: Head,
    tokens: Int[Tensor, " position"],
    temperature: float,
    vocab_size: int,
    *,
    head_is_frozen: bool = False,
    kernels: str | None = None,
) -> tuple[Float[Tensor, " position"], Float[Tensor, " position"]]:
    """`token_logps` with the same bits, and the entropy in nats: a statistic that carries no gradient."""
    rows, max_logits = _implementation(hidden, kernels)
    logps, entropy = in_chunks(
        lambda hidden, tokens: rows.chosen_logps_and_entropy(head(hidden), tokens, temperature),
        hidden,
        tokens,
        size=max(max_logits // vocab_size, 1),
        is_linearised=_is_linearised(head_is_frozen, (head, hidden)),
    )
    return logps, entropy


def policy_kl(
    hidden_p: Float[Tensor, "position dim"],
    hidden_q: Float[Tensor, "position dim"],
    head_p: Head,
    head_q: Head,
    temperature: float,
    vocab_size: int,
    *,
    heads_are_frozen: bool = False,
    kernels: str | None = None,
) -> Float[Tensor, " position"]:
    """KL(p ‖ q) = Σ_v p_v (log p_v − log q_v) over the whole vocabulary, in nats, at each position.

    Args:
        heads_are_frozen: only the hidden states need gradients; as in `token_logps`, for both heads.

    Raises:
        ValueError: the heads are called frozen, and parameters of one require a gradient.
    """
    rows, max_logits = _implementation(hidden_p, kernels)
    (kl,) = in_chunks(
        lambda hidden_p, hidden_q: (rows.kl_of_logits(head_p(hidden_p), head_q(hidden_q), temperature),),
        hidden_p,
        hidden_q,
        size=max(max_logits // vocab_size, 1),
        is_linearised=_is_linearised(heads_are_frozen, (head_p, hidden_p), (head_q, hidden_q)),
    )
    return kl


def _implementation(hidden: Tensor, kernels: str | None) -> tuple[ModuleType, int]:
    """What turns the logits of a chunk into numbers, and how many logits a chunk may have."""
    if uses_triton(hidden, kernels):
        from lit_rlkv.kernels.token_logps import operations  # not at the top: Triton exists on Linux only

        return operations, chunks.TRITON_MAX_CHUNK_LOGITS
    return reference, reference.MAX_CHUNK_LOGITS


def _is_linearised(is_frozen: bool, *sides: tuple[Head, Tensor]) -> bool:
    """What the caller says of the heads, once it is found to be true."""
    if is_frozen and torch.is_grad_enabled():
        for head, hidden in sides:
            check_frozen(head, hidden)
    return is_frozen
