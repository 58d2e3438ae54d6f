"""Sample tokens on the device, with their log-probs."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_rlkv.kernels.token_logps import tempered


def sample(
    logits: Float[Tensor, "batch vocab"], temperature: float, generator: torch.Generator | None
) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Return tokens drawn from softmax(logits / temperature) and their log-probs; greedy at temperature 0.

    argmax(p / e) with e ~ Exp(1) is a draw from p and, unlike torch.multinomial, never waits for the device.
    """
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros(tokens.shape, device=logits.device, dtype=torch.float32)
    logps = tempered(logits.float(), temperature).log_softmax(-1)
    noise = torch.empty_like(logps).exponential_(generator=generator)
    tokens = logps.exp().div_(noise).argmax(-1)
    return tokens, logps.gather(-1, tokens[:, None]).squeeze(-1)
