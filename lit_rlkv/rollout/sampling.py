"""Sample tokens on the device, with their log-probs and the tokens that they were chosen from."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rlkv.checks import Range
from lit_rlkv.kernels.token_logps import tempered
from lit_rlkv.kernels.token_sampling import NoiseRows, sample_tokens

Kept = Tensor
"""The tokens that a truncation keeps in each row: int32 ids [row, top_k] with -1 for dropped ones, or without
`top_k` a mask, bool [row, vocab]."""


@dataclass(frozen=True)
class Truncation:
    """Restriction of the sampler to likely tokens, as in transformers: `top_k`, then `top_p`, then `min_p`.

    Each applies to the distribution that the ones before leave, renormalised, and keeps the likeliest token.

    Args:
        top_k: keep the likeliest tokens, exactly so many also if some are equally likely; None: all.
        top_p: keep the fewest likeliest tokens whose probabilities add up to at least this; 1: all.
        min_p: drop tokens less likely than this times the likeliest one; 0 or None: none.

    Raises:
        ValueError: a number is out of its range.
    """

    top_k: int | None = None
    top_p: float | int = 1.0
    min_p: float | int | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None:
            Range(least=1).check("top_k", self.top_k, int, hint="None keeps all tokens")
        Range(above=0, most=1).check("top_p", self.top_p, hint="1 keeps all tokens")
        if self.min_p is not None:
            Range(least=0, below=1).check("min_p", self.min_p, hint="0 keeps all tokens")

    @property
    def is_on(self) -> bool:
        """True if it may drop tokens."""
        return self.top_k is not None or self.top_p < 1 or bool(self.min_p)

    def is_kept(self, ordered: Float[Tensor, "row place"]) -> Bool[Tensor, "row place"]:
        """Return the tokens that `top_p` and `min_p` keep, given logits / temperature in ascending order."""
        is_kept = torch.ones_like(ordered, dtype=torch.bool)
        if self.top_p < 1:
            is_kept = ~(ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.top_p)
        if self.min_p:
            is_kept = is_kept & ~self._is_unlikely(ordered, ordered[:, -1:])
        is_kept[:, -1] = True
        return is_kept

    def _is_unlikely(self, logits: Tensor, best: Tensor) -> Tensor:
        assert self.min_p is not None
        return (logits - best).exp() < self.min_p

    def kept_mask(self, logits: Float[Tensor, "row vocab"]) -> Bool[Tensor, "row vocab"]:
        """Return the tokens that `top_p` and `min_p` keep, given logits / temperature."""
        if self.top_p == 1:  # without a sort of the vocabulary
            return ~self._is_unlikely(logits, logits.amax(dim=-1, keepdim=True))
        ordered, ids = logits.sort(dim=-1)
        return torch.empty_like(ids, dtype=torch.bool).scatter_(1, ids, self.is_kept(ordered))


def sample(
    logits: Float[Tensor, "batch vocab"],
    temperature: float,
    generator: torch.Generator | None,
    truncation: Truncation | None = None,
    noise_rows: NoiseRows | None = None,
) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"], Kept | None]:
    """Return tokens drawn from softmax(logits / temperature), their log-probs, and what they were drawn from.

    Temperature 0 is greedy, with log-probs of 0.

    Args:
        truncation: draw from the tokens that it keeps, with log-probs of the renormalised distribution. None:
            draw from the whole vocabulary, for which None is returned too.
        noise_rows: see `sample_tokens`.
    """
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros(tokens.shape, device=logits.device, dtype=torch.float32), None
    if truncation is None or not truncation.is_on:
        return *sample_tokens(logits, temperature, generator, noise_rows), None
    if truncation.top_k is None:
        is_kept = truncation.kept_mask(tempered(logits, temperature))
        logits = logits.masked_fill(~is_kept, -torch.inf)
        return *sample_tokens(logits, temperature, generator, noise_rows), is_kept
    ordered, ids = (part.flip(-1) for part in logits.topk(min(truncation.top_k, logits.shape[-1])))
    is_kept = truncation.is_kept(tempered(ordered, temperature))
    ordered = ordered.masked_fill(~is_kept, -torch.inf)
    places, logps = sample_tokens(ordered, temperature, generator, noise_rows)
    tokens = ids.gather(-1, places[:, None]).squeeze(-1)
    return tokens, logps, ids.int().masked_fill(~is_kept, -1)
