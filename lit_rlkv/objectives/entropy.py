"""Entropy of the policy with a gradient, for an entropy bonus."""

import math

from jaxtyping import Float
from torch import Tensor

from lit_rlkv.kernels.token_logps import Head, policy_kl


def token_entropy(
    hidden: Float[Tensor, "action dim"],
    head: Head,
    temperature: float,
    vocab_size: int,
    *,
    head_is_frozen: bool = False,
) -> Float[Tensor, " action"]:
    """Return the entropy of softmax(head(hidden) / temperature) at each position, in nats; gradients flow.

    It is log n − KL(π ‖ uniform) over the n logits, so that the logits of a whole batch never exist at once.

    Args:
        vocab_size: sets the positions of a chunk; see `policy_kl`.
        head_is_frozen: True if no parameter of the head needs a gradient.
    """
    n_logits = head(hidden[:0].detach()).shape[-1]

    def uniform(hidden: Tensor) -> Tensor:
        return hidden.new_zeros(len(hidden), n_logits)

    from_uniform = policy_kl(
        hidden, hidden.detach(), head, uniform, temperature, vocab_size, heads_are_frozen=head_is_frozen
    )
    return math.log(n_logits) - from_uniform
