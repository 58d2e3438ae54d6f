"""Log-probs of chosen tokens and KL of two policies, computed without the logits of a whole batch."""

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.token_logps import chunks, reference
from lit_rlkv.kernels.token_logps.chunks import Head, check_frozen, in_chunks
from lit_rlkv.kernels.token_logps.reference import tempered
from lit_rlkv.kernels.token_logps.sets import TokenSets, chunk_of, kept_logits, kept_pair, spans_of

__all__ = [
    "Head",
    "TokenSets",
    "chunk_of",
    "in_chunks",
    "policy_kl",
    "spans_of",
    "tempered",
    "token_logps",
    "token_logps_and_entropy",
]


def token_logps(
    hidden: Float[Tensor, "position dim"],
    head: Head,
    tokens: Int[Tensor, " position"],
    temperature: float,
    vocab_size: int,
    *,
    head_is_frozen: bool = False,
    sets: TokenSets | None = None,
    kernels: str | None = None,
) -> Float[Tensor, " position"]:
    """Return the log-prob of each token under softmax(head(hidden) / temperature), in nats.

    Args:
        head_is_frozen: True if only `hidden` needs a gradient. The forward pass then computes and stores it,
            [position, dim], which saves computing the logits again in the backward pass.
        sets: renormalise each position's distribution over its set, with gradients through the logits of the
            set alone; a token outside of its set has log-prob -inf. None: the whole vocabulary.

    Raises:
        ValueError: `head_is_frozen` is True, but a parameter of the head requires a gradient.
    """
    rows, max_logits = _implementation(hidden, kernels)
    (logps,) = in_chunks(
        lambda hidden, tokens, *spans: (
            rows.chosen_logps(*kept_logits(sets, spans, head(hidden), tokens), temperature),
        ),
        hidden,
        tokens,
        *spans_of(sets),
        size=max(max_logits // vocab_size, 1),
        stores_gradients=check_frozen(head_is_frozen, (head, hidden)),
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
    sets: TokenSets | None = None,
    kernels: str | None = None,
) -> tuple[Float[Tensor, " position"], Float[Tensor, " position"]]:
    """Return `token_logps`, bit for bit, and the entropy in nats, which carries no gradient."""
    rows, max_logits = _implementation(hidden, kernels)
    logps, entropy = in_chunks(
        lambda hidden, tokens, *spans: rows.chosen_logps_and_entropy(
            *kept_logits(sets, spans, head(hidden), tokens), temperature
        ),
        hidden,
        tokens,
        *spans_of(sets),
        size=max(max_logits // vocab_size, 1),
        stores_gradients=check_frozen(head_is_frozen, (head, hidden)),
    )
    return logps, entropy


def policy_kl(
    hidden_p: Float[Tensor, "position dim_p"],
    hidden_q: Float[Tensor, "position dim_q"],
    head_p: Head,
    head_q: Head,
    temperature: float,
    vocab_size: int,
    *,
    beta: float | int = 0,
    heads_are_frozen: bool = False,
    sets: TokenSets | None = None,
    kernels: str | None = None,
) -> Float[Tensor, " position"]:
    """Return KL(p ‖ q) = Σ_v p_v (log p_v − log q_v) over the whole vocabulary, in nats, at each position.

    Args:
        beta: for 0 < beta < 1 return the generalised JSD instead; see `_jsd`.
        heads_are_frozen: True if only the hidden states need gradients; see `token_logps`.
        sets: renormalise both distributions over the same set at each position; see `token_logps`.

    Raises:
        ValueError: `heads_are_frozen` is True, but a parameter of a head requires a gradient.
    """
    rows, max_logits = _implementation(hidden_p, kernels)
    divergence = rows.kl_of_logits if beta == 0 else partial(_jsd, rows.kl_of_logits, beta)
    (kl,) = in_chunks(
        lambda hidden_p, hidden_q, *spans: (
            divergence(*kept_pair(sets, spans, head_p(hidden_p), head_q(hidden_q)), temperature),
        ),
        hidden_p,
        hidden_q,
        *spans_of(sets),
        size=max(max_logits // vocab_size, 1),
        stores_gradients=check_frozen(heads_are_frozen, (head_p, hidden_p), (head_q, hidden_q)),
    )
    return kl


def _jsd(
    kl: Callable[..., Tensor], beta: float, p_logits: Tensor, q_logits: Tensor, temperature: float
) -> Tensor:
    """Return β·KL(p ‖ m) + (1 − β)·KL(q ‖ m) with m = β·p + (1 − β)·q."""
    logps = (tempered(logits, temperature).log_softmax(-1) for logits in (p_logits, q_logits))
    log_p, log_q = (each.clamp(min=-1e4) for each in logps)  # the gradient of two -inf would be NaN
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * kl(log_p, log_m, 1.0) + (1 - beta) * kl(log_q, log_m, 1.0)


def _implementation(hidden: Tensor, kernels: str | None) -> tuple[ModuleType, int]:
    """Return the module of functions on logits, and the most logits of a chunk."""
    if uses_triton(hidden, kernels):
        from lit_rlkv.kernels.token_logps import operations  # not at the top: Triton exists on Linux only

        return operations, chunks.TRITON_MAX_CHUNK_LOGITS
    return reference, reference.MAX_CHUNK_LOGITS
