"""Definition of log-probs of chosen tokens and of the full-vocabulary KL, on the logits of a chunk."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

MAX_CHUNK_LOGITS = 2**24
"""Most logits held at once in float32: 64 MiB."""


def chosen_logps(
    logits: Float[Tensor, "position vocab"], tokens: Int[Tensor, " position"], temperature: float
) -> Float[Tensor, " position"]:
    """Return the log-prob of each token under softmax(logits / temperature), in nats."""
    return _chosen(tempered(logits, temperature).log_softmax(-1), tokens)


def chosen_logps_and_entropy(
    logits: Float[Tensor, "position vocab"], tokens: Int[Tensor, " position"], temperature: float
) -> tuple[Float[Tensor, " position"], Float[Tensor, " position"]]:
    """Return `chosen_logps`, and the entropy in nats, which carries no gradient."""
    logps = tempered(logits, temperature).log_softmax(-1)
    with torch.no_grad():
        # In place, to save a chunk of peak memory. Log-probs of -inf are masked, because 0 · -inf is NaN.
        entropy = -logps.exp().mul_(logps).masked_fill_(logps == -torch.inf, 0.0).sum(-1)
    return _chosen(logps, tokens), entropy


def kl_of_logits(
    p_logits: Float[Tensor, "position vocab"], q_logits: Float[Tensor, "position vocab"], temperature: float
) -> Float[Tensor, " position"]:
    """Return KL(p ‖ q) = Σ_v p_v (log p_v − log q_v) in nats for p, q = softmax(logits / temperature)."""
    log_p = tempered(p_logits, temperature).log_softmax(-1)
    log_q = tempered(q_logits, temperature).log_softmax(-1)
    p = log_p.exp()
    return (p * (log_p - log_q).masked_fill(p == 0, 0.0)).sum(-1)


def tempered(logits: Float[Tensor, "*lead vocab"], temperature: float | int) -> Float[Tensor, "*lead vocab"]:
    """Return logits / temperature in float32, or in their own precision if it is higher.

    At temperature 1 this may be the logits themselves, to save a copy.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits / temperature


def _chosen(logps: Float[Tensor, "position vocab"], tokens: Int[Tensor, " position"]) -> Tensor:
    return logps.gather(-1, tokens[:, None]).squeeze(-1)
