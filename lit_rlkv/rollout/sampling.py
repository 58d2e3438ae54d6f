"""Sample tokens on the device, with their log-probs."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_rlkv.kernels.token_sampling import sample_tokens


def sample(
    logits: Float[Tensor, "batch vocab"], temperature: float, generator: torch.Generator | None
) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Return tokens drawn from softmax(logits / temperature) and their log-probs; greedy at temperature 0."""
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros(tokens.shape, device=logits.device, dtype=torch.float32)
    return sample_tokens(logits, temperature, generator)
