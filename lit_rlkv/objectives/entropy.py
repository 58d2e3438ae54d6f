"""Entropy of the policy: with a gradient for an entropy bonus, and as a choice of tokens to learn from."""

import math

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.kernels.token_logps import Head, TokenSets, policy_kl


def token_entropy(
    hidden: Float[Tensor, "action dim"],
    head: Head,
    temperature: float,
    vocab_size: int,
    *,
    head_is_frozen: bool = False,
    sets: TokenSets | None = None,
) -> Float[Tensor, " action"]:
    """Return the entropy of softmax(head(hidden) / temperature) at each position, in nats; gradients flow.

    It is log n − KL(π ‖ uniform) over the n logits, or those of a set, so that the logits of a whole batch
    never exist at once.

    Args:
        vocab_size: sets the positions of a chunk; see `policy_kl`.
        head_is_frozen: True if no parameter of the head needs a gradient.
        sets: renormalise each distribution over its set; see `token_logps`.
    """
    n_logits = head(hidden[:0].detach()).shape[-1]

    def uniform(hidden: Tensor) -> Tensor:
        return hidden.new_zeros(len(hidden), n_logits)

    from_uniform = policy_kl(
        hidden,
        hidden.detach(),
        head,
        uniform,
        temperature,
        vocab_size,
        heads_are_frozen=head_is_frozen,
        sets=sets,
    )
    return (math.log(n_logits) if sets is None else sets.counts.log()) - from_uniform


def has_high_entropy(
    entropy: Float[Tensor, "batch seq"], is_counted: Bool[Tensor, "batch seq"], share: float | int
) -> Bool[Tensor, "batch seq"]:
    """Return True at the counted tokens with an entropy at or above its quantile 1 − share.

    The policy gradient of only these tokens is from "Beyond the 80/20 rule" (arXiv:2506.01939).

    Args:
        share: share of the counted tokens, from 0 (the highest entropy and its ties) to 1 (all).
    """
    counted = entropy[is_counted]
    if len(counted) == 0:
        return is_counted
    # No token lies between an interpolated quantile and the next entropy above it; 1e-9 is for rounding.
    rank = math.ceil((1 - share) * (len(counted) - 1) - 1e-9) + 1
    return is_counted & (entropy >= counted.kthvalue(rank).values)
