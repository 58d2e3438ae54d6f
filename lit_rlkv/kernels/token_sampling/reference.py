"""Definition of token sampling."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_rlkv.kernels.token_logps import tempered


@dataclass(frozen=True)
class NoiseRows:
    """Draw random numbers for `n` rows, and use those of some of them: rows that go on without the others."""

    index: Int[Tensor, " row"]
    n: int


def sample_tokens(
    logits: Float[Tensor, "row vocab"],
    temperature: float,
    generator: torch.Generator | None,
    noise_rows: NoiseRows | None = None,
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"]]:
    """Return tokens drawn from softmax(logits / temperature), and their float32 log-probs in nats.

    The same state of the generator draws the same tokens, but reference and kernel draw different ones.

    Args:
        noise_rows: the rows of the noise, by default one for each row of `logits`.
    """
    tokens, logps = _draw(logits, temperature, generator, noise_rows)
    return tokens, logps.gather(-1, tokens[:, None]).squeeze(-1)


def sample_tokens_and_entropy(
    logits: Float[Tensor, "row vocab"],
    temperature: float,
    generator: torch.Generator | None,
    noise_rows: NoiseRows | None = None,
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"], Float[Tensor, " row"]]:
    """Return `sample_tokens`, bit for bit, and the entropy of softmax(logits / temperature) in nats."""
    tokens, logps = _draw(logits, temperature, generator, noise_rows)
    entropy = -(logps.exp() * logps).masked_fill(logps == -torch.inf, 0.0).sum(-1)
    return tokens, logps.gather(-1, tokens[:, None]).squeeze(-1), entropy


def _draw(
    logits: Float[Tensor, "row vocab"],
    temperature: float,
    generator: torch.Generator | None,
    noise_rows: NoiseRows | None,
) -> tuple[Int[Tensor, " row"], Float[Tensor, "row vocab"]]:
    """Return tokens and all log-probs.

    argmax(p / e) with e ~ Exp(1) is a draw from p and, unlike torch.multinomial, never waits for the device.
    """
    logps = tempered(logits.float(), temperature).log_softmax(-1)
    n_rows = len(logps) if noise_rows is None else noise_rows.n
    noise = logps.new_empty(n_rows, logps.shape[1]).exponential_(generator=generator)
    if noise_rows is not None:
        noise = noise[noise_rows.index]
    return logps.exp().div_(noise).argmax(-1), logps
