"""What the samples of an evaluation say of the policy, and how surely."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from lit_rlkv.diagnostics.bootstrap import Estimate, bootstrap_mean
from lit_rlkv.diagnostics.pass_at_k import pass_at_k
from lit_rlkv.evaluation.evaluator import Sample
from lit_rlkv.rng import stream

RIGHT = 1.0
"""The score from which on a sample counts as right for pass@k; accuracy is the mean score."""


@dataclass(frozen=True)
class Estimates:
    """Means over the problems, each with its interval."""

    accuracy: Estimate
    mean_length: Estimate
    """Tokens per response."""
    pass_at_k: dict[int, Estimate]


def estimate(
    samples: Sequence[Sample], ks: Sequence[int], *, level: float, n_resamples: int, seed: int
) -> Estimates:
    """Accuracy, length and pass@k of the samples of one cache; all resample the same problems.

    Raises:
        ValueError: a k that is more than the samples of a problem.
    """
    by_problem = [
        list(group) for _, group in groupby(sorted(samples, key=lambda s: s.problem), key=lambda s: s.problem)
    ]

    def mean(value: Callable[[list[Sample]], float]) -> Estimate:
        values = torch.tensor([value(group) for group in by_problem], dtype=torch.float64)
        generator = stream(seed, "bootstrap")
        return bootstrap_mean(values, level=level, n_resamples=n_resamples, generator=generator)

    def passing(k: int) -> Estimate:
        return mean(lambda group: pass_at_k(len(group), sum(s.score >= RIGHT for s in group), k))

    return Estimates(
        accuracy=mean(lambda group: sum(s.score for s in group) / len(group)),
        mean_length=mean(lambda group: sum(s.n_tokens for s in group) / len(group)),
        pass_at_k={k: passing(k) for k in ks},
    )
