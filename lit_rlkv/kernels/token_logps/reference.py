"""Definition of log-probs of chosen tokens and of the full-vocabulary KL, on the logits of a chunk."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

MAX_CHUNK_LOGITS = 2**24
"""Most logits held at once in float32: 64 MiB."""


def chosen_logps(
    logits: Float[Tensor, "position vocab"], tokens: Int[Tensor, " position"], temperature: float
) -> Float[Tensor, " position"]:
    """Log-prob of each token under softmax(logits / temperature), in nats."""
    return _chosen(tempered(logits, temperature).log_softmax(-1), tokens)


def chosen_logps_and_entropy(
    logits: Float[Tensor, "position vocab"], tokens: Int[Tensor, " position"], temperature: float
) -> tuple[Float[Tensor, " position"], Float[Tensor, " position"]]:
    """Return `chosen_logps`, and the entropy in nats, which carries no gradient."""
    logps = tempered(logits, temperature).log_softmax(-1)
    with torch.no_grad():
        # In place, for a chunk less at the peak. What has no probability is -inf, and 0 · -inf would be NaN.
        entropy = -logps.exp().mul_(logps).masked_fill_(logps == -torch.inf, 0.0).sum(-1)
    return _chosen(logps, tokens), entropy


def kl_of_logits(
    p_logits: Float[Tensor, "position vocab"], q_logits: Float[Tensor, "position vocab"], temperature: float
) -> Float[Tensor, " position"]:
    """KL(p ‖ q) = Σ_v p_v (log p_v − log q_v) in nats, where p and q are softmax(logits / temperature)."""
    log_p = tempered(p_logits, temperature).log_softmax(-1)
    log_q = tempered(q_logits, temperature).log_softmax(-1)
    p = log_p.exp()
    return (p * (log_p - log_q).masked_fill(p == 0, 0.0)).sum(-1)


def tempered(logits: Float[Tensor, "*lead vocab"], temperature: float | int) -> Float[Tensor, "*lead vocab"]:
    """logits / temperature, of which a softmax is the policy: in float32, or their own precision if higher.

    At temperature 1 perhaps the logits themselves, because dividing them would hold them twice.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits / temperature


def _chosen(logps: Float[Tensor, "position vocab"], tokens: Int[Tensor, " position"]) -> Tensor:
    return logps.gather(-1, tokens[:, None]).squeeze(-1)
