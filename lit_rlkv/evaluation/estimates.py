"""Accuracy, length and pass@k of an evaluation, with their confidence intervals."""

from collections.abc import Sequence
from itertools import groupby
from math import comb
from statistics import fmean

from lit_rlkv.evaluation.evaluator import ScoredResponse, is_right
from lit_rlkv.evaluation.intervals import clustered_share, mean_interval
from lit_rlkv.evaluation.results import CacheEstimates, IntervalEstimate


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


def estimate(samples: Sequence[ScoredResponse], ks: Sequence[int], *, level: float) -> CacheEstimates:
    """Return accuracy, reward, length and pass@k of the samples of one cache, with intervals over problems.

    Raises:
        ValueError: a k is larger than the number of samples of a problem.
    """
    by_problem = [
        list(group) for _, group in groupby(sorted(samples, key=lambda s: s.problem), key=lambda s: s.problem)
    ]
    n_samples = len(by_problem[0])

    def passing(k: int) -> IntervalEstimate:
        shares = [pass_at_k(len(group), sum(map(is_right, group)), k) for group in by_problem]
        return clustered_share(shares, n_samples, level)

    given = [[s.reward for s in group if s.reward is not None] for group in by_problem]
    rewards = [fmean(group) for group in given if group]
    return CacheEstimates(
        accuracy=None if samples[0].score is None else passing(1),
        reward=mean_interval(rewards, level) if rewards else None,
        mean_length=mean_interval([fmean(s.n_tokens for s in group) for group in by_problem], level),
        pass_at_k={k: passing(k) for k in ks},
    )
