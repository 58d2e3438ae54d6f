"""From the logits of a chunk to log-probs of chosen tokens and to full-vocabulary KL: the definition."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

MAX_CHUNK_LOGITS = 2**24
"""Most logits held at once in float32: 64 MiB."""


def chosen_logps(
    logits: Float[Tensor, "position vocab"], tokens: Int[Tensor, " position"], temperature: float
) -> tuple[Float[Tensor, " position"], Float[Tensor, " position"]]:
    """Log-prob of each token under softmax(logits / temperature), and the entropy, in nats.

    The entropy is a statistic and carries no gradient.
    """
    logps = _log_softmax(logits, temperature)
    with torch.no_grad():
        # In place, for a chunk less at the peak. What has no probability is -inf, and 0 · -inf would be NaN.
        entropy = -logps.exp().mul_(logps).masked_fill_(logps == -torch.inf, 0.0).sum(-1)
    return logps.gather(-1, tokens[:, None]).squeeze(-1), entropy


def kl_of_logits(
    p_logits: Float[Tensor, "position vocab"], q_logits: Float[Tensor, "position vocab"], temperature: float
) -> Float[Tensor, " position"]:
    """KL(p ‖ q) = Σ_v p_v (log p_v − log q_v) in nats, where p and q are softmax(logits / temperature)."""
    log_p, log_q = _log_softmax(p_logits, temperature), _log_softmax(q_logits, temperature)
    p = log_p.exp()
    return (p * (log_p - log_q).masked_fill(p == 0, 0.0)).sum(-1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """In float32, or in the logits' own precision if that is higher."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The caller still holds the logits: dividing them by 1 would hold them twice.
    return (logits if temperature == 1 else logits / temperature).log_softmax(-1)
