"""From hidden states to log-probs of chosen tokens and to full-vocabulary KL, in chunks of positions."""

from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Output = TypeVar("Output")

Head = Callable[[Tensor], Tensor]
"""Hidden states [position, dim] to logits [position, vocab]."""

MAX_CHUNK_LOGITS = 2**24
"""Most logits held at once in float32: 64 MiB."""


def token_logps(
    hidden: Float[Tensor, "position dim"],
    head: Head,
    tokens: Int[Tensor, " position"],
    temperature: float,
    vocab_size: int,
) -> tuple[Float[Tensor, " position"], Float[Tensor, " position"]]:
    """Log-prob of each token under softmax(head(hidden) / temperature), and the entropy in nats.

    The entropy is a statistic and carries no gradient.
    """

    def of_chunk(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logps = (head(hidden).float() / temperature).log_softmax(-1)
        with torch.no_grad():
            entropy = -(logps.exp() * logps).sum(-1)
        return logps.gather(-1, tokens[:, None]).squeeze(-1), entropy

    chunks = [_in_chunk(of_chunk, *pair) for pair in _chunks(vocab_size, hidden, tokens)]
    logps, entropy = zip(*chunks, strict=True)
    return torch.cat(logps), torch.cat(entropy)


def policy_kl(
    hidden_p: Float[Tensor, "position dim"],
    hidden_q: Float[Tensor, "position dim"],
    head_p: Head,
    head_q: Head,
    temperature: float,
    vocab_size: int,
) -> Float[Tensor, " position"]:
    """KL(p ‖ q) = Σ_v p_v (log p_v − log q_v) over the whole vocabulary, in nats, at each position."""

    def of_chunk(hidden_p: Tensor, hidden_q: Tensor) -> Tensor:
        log_p = (head_p(hidden_p).float() / temperature).log_softmax(-1)
        log_q = (head_q(hidden_q).float() / temperature).log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    return torch.cat([_in_chunk(of_chunk, *pair) for pair in _chunks(vocab_size, hidden_p, hidden_q)])


def _chunks(vocab_size: int, first: Tensor, second: Tensor) -> list[tuple[Tensor, Tensor]]:
    size = max(MAX_CHUNK_LOGITS // vocab_size, 1)
    return list(zip(torch.split(first, size), torch.split(second, size), strict=True))


def _in_chunk(function: Callable[..., Output], *tensors: Tensor) -> Output:
    """Run one chunk, and rather than keep its logits for the backward pass compute them again there."""
    if not torch.is_grad_enabled():
        return function(*tensors)
    output: Output = checkpoint(function, *tensors, use_reentrant=False)
    return output
