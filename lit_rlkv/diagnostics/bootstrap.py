"""How sure a mean over prompts is: percentile bootstrap."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A mean, and the bounds that it lies in with the probability asked for."""

    value: float
    low: float
    high: float


def bootstrap_mean(
    values: Float[Tensor, " prompt"], *, level: float, n_resamples: int, generator: torch.Generator
) -> Estimate:
    """The mean with its percentile interval (Efron 1979): prompts are drawn anew, as many, with replacement.

    The prompts are what is sampled: responses to one prompt are no independent evidence, so give one value
    for each prompt. The bounds are the (1 ± level) / 2 quantiles of the means of the resamples. Intervals of
    equal generators draw the same prompts. With one prompt, or equal values, the interval is a point and
    says nothing.

    Raises:
        ValueError: no values, a level outside of 0 to 1, or no resamples.
    """
    if len(values) == 0:
        raise ValueError("there is no mean of no prompts; give at least one value")
    if not 0 < level < 1:
        raise ValueError(f"level={level} is no probability between 0 and 1; give 0.95 or so")
    if n_resamples < 1:
        raise ValueError(f"n_resamples={n_resamples} draws nothing; give at least 1, better 1000 or more")
    values = values.double().cpu()
    drawn = torch.randint(len(values), (n_resamples, len(values)), generator=generator)
    bounds = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = values[drawn].mean(dim=1).quantile(bounds).tolist()
    return Estimate(values.mean().item(), low, high)
