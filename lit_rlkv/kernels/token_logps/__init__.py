"""Log-probs of chosen tokens and KL of two policies, computed without the logits of a whole batch."""

from functools import partial
from types import ModuleType

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
        beta: 0 < beta < 1 returns the generalised Jensen-Shannon divergence, `reference.jsd_of_logits`, in
            plain PyTorch.
        heads_are_frozen: True if only the hidden states need gradients; see `token_logps`.
        sets: renormalise both distributions over the same set at each position; see `token_logps`.

    Raises:
        ValueError: `heads_are_frozen` is True, but a parameter of a head requires a gradient.
    """
    rows, max_logits = _implementation(hidden_p, kernels if beta == 0 else "reference")
    divergence = rows.kl_of_logits if beta == 0 else partial(reference.jsd_of_logits, beta=beta)
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


def _implementation(hidden: Tensor, kernels: str | None) -> tuple[ModuleType, int]:
    """Return the module of functions on logits, and the most logits of a chunk."""
    if uses_triton(hidden, kernels):
        from lit_rlkv.kernels.token_logps import operations  # not at the top: Triton exists on Linux only

        return operations, chunks.TRITON_MAX_CHUNK_LOGITS
    return reference, reference.MAX_CHUNK_LOGITS
