"""Sample tokens on the device, with their log-probs and the tokens that they were chosen from."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rlkv.kernels.token_logps import tempered
from lit_rlkv.kernels.token_sampling import NoiseRows, sample_tokens
from lit_rlkv.settings import Sampling

Kept = Tensor
"""The tokens that a restricted sampler keeps in each row: int32 ids [row, top_k] with -1 for dropped ones, or
without `top_k` a mask, bool [row, vocab]."""


def keeps(sampling: Sampling, ordered: Float[Tensor, "row place"]) -> Bool[Tensor, "row place"]:
    """Return the tokens that `top_p` and `min_p` keep, given logits / temperature in ascending order."""
    is_kept = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_p < 1:
        is_kept = ~(ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p)
    if sampling.min_p:
        is_kept = is_kept & ~_is_unlikely(ordered, ordered[:, -1:], sampling.min_p)
    is_kept[:, -1] = True
    return is_kept


def kept_mask(sampling: Sampling, logits: Float[Tensor, "row vocab"]) -> Bool[Tensor, "row vocab"]:
    """Return the tokens that `top_p` and `min_p` keep, given logits / temperature."""
    if sampling.top_p == 1 and sampling.min_p:  # without a sort of the vocabulary
        return ~_is_unlikely(logits, logits.amax(dim=-1, keepdim=True), sampling.min_p)
    ordered, ids = logits.sort(dim=-1)
    return torch.empty_like(ids, dtype=torch.bool).scatter_(1, ids, keeps(sampling, ordered))


def _is_unlikely(logits: Tensor, best: Tensor, min_p: float | int) -> Tensor:
    return (logits - best).exp() < min_p


def sample(
    logits: Float[Tensor, "batch vocab"],
    sampling: Sampling,
    generator: torch.Generator | None,
    noise_rows: NoiseRows | None = None,
) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"], Kept | None]:
    """Return tokens drawn from softmax(logits / temperature), their log-probs, and what they were drawn from.

    Temperature 0 is greedy, with log-probs of 0. Where `sampling` restricts the tokens, log-probs are of the
    renormalised distribution; else they are drawn from the whole vocabulary, for which None is returned.

    Args:
        noise_rows: see `sample_tokens`.
    """
    temperature = sampling.temperature
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros(tokens.shape, device=logits.device, dtype=torch.float32), None
    if not sampling.is_restricted:
        return *sample_tokens(logits, temperature, generator, noise_rows), None
    if sampling.top_k is None:
        is_kept = kept_mask(sampling, tempered(logits, temperature))
        logits = logits.masked_fill(~is_kept, -torch.inf)
        return *sample_tokens(logits, temperature, generator, noise_rows), is_kept
    ordered, ids = (part.flip(-1) for part in logits.topk(min(sampling.top_k, logits.shape[-1])))
    is_kept = keeps(sampling, tempered(ordered, temperature))
    ordered = ordered.masked_fill(~is_kept, -torch.inf)
    places, logps = sample_tokens(ordered, temperature, generator, noise_rows)
    tokens = ids.gather(-1, places[:, None]).squeeze(-1)
    return tokens, logps, ids.int().masked_fill(~is_kept, -1)
