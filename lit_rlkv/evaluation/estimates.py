"""Accuracy, length and pass@k of an evaluation, with bootstrap intervals."""

from collections.abc import Callable, Sequence
from itertools import groupby
from math import comb

import torch
from jaxtyping import Float
from torch import Tensor

from lit_rlkv.evaluation.evaluator import ScoredResponse
from lit_rlkv.evaluation.results import CacheEstimates, IntervalEstimate
from lit_rlkv.rng import stream


def pass_at_k(n_samples: int, n_right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from one prompt's responses: 1 − C(n − c, k) / C(n, k).

    Chen et al. 2021, arXiv:2107.03374. Computed in exact integers up to one division.

    Raises:
        ValueError: k is not between 1 and `n_samples`, or more samples are correct than there are.
    """
    if not 1 <= k <= n_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {n_samples} samples; give k from 1 to n_samples")
    if not 0 <= n_right <= n_samples:
        raise ValueError(f"n_right={n_right} of n_samples={n_samples} must be between 0 and n_samples")
    n_sets = comb(n_samples, k)
    return (n_sets - comb(n_samples - n_right, k)) / n_sets


def bootstrap_mean(
    values: Float[Tensor, " prompt"], *, level: float, n_resamples: int, generator: torch.Generator
) -> IntervalEstimate:
    """Return the mean with its bootstrap percentile interval over prompts (Efron 1979).

    Prompts are resampled, as responses to one prompt are not independent, so give one value for each prompt.
    The bounds are the (1 ± level) / 2 quantiles of the resampled means. Equal generators draw the same
    prompts. With one prompt, or equal values, the interval is a point and has no meaning.

    Raises:
        ValueError: no values, a level outside of 0 to 1, or no resamples.
    """
    if len(values) == 0:
        raise ValueError("values must hold at least one prompt, got none")
    if not 0 < level < 1:
        raise ValueError(f"level={level} must be a probability between 0 and 1, such as 0.95")
    if n_resamples < 1:
        raise ValueError(f"n_resamples={n_resamples} must be at least 1, better 1000 or more")
    values = values.double().cpu()
    drawn = torch.randint(len(values), (n_resamples, len(values)), generator=generator)
    bounds = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = values[drawn].mean(dim=1).quantile(bounds).tolist()
    return IntervalEstimate(values.mean().item(), low, high)


RIGHT = 1.0
"""Lowest score that counts as correct for pass@k; accuracy is the mean score."""


def estimate(
    samples: Sequence[ScoredResponse], ks: Sequence[int], *, level: float, n_resamples: int, seed: int
) -> CacheEstimates:
    """Return accuracy, length and pass@k of the samples of one cache; all resample the same problems.

    Raises:
        ValueError: a k is larger than the number of samples of a problem.
    """
    by_problem = [
        list(group) for _, group in groupby(sorted(samples, key=lambda s: s.problem), key=lambda s: s.problem)
    ]

    def mean(value: Callable[[list[ScoredResponse]], float]) -> IntervalEstimate:
        values = torch.tensor([value(group) for group in by_problem], dtype=torch.float64)
        generator = stream(seed, "bootstrap")
        return bootstrap_mean(values, level=level, n_resamples=n_resamples, generator=generator)

    def passing(k: int) -> IntervalEstimate:
        return mean(lambda group: pass_at_k(len(group), sum(s.score >= RIGHT for s in group), k))

    return CacheEstimates(
        accuracy=mean(lambda group: sum(s.score for s in group) / len(group)),
        mean_length=mean(lambda group: sum(s.n_tokens for s in group) / len(group)),
        pass_at_k={k: passing(k) for k in ks},
    )
