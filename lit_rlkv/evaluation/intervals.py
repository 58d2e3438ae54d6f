"""Confidence intervals of accuracies and other means, without torch."""

from collections.abc import Sequence
from functools import cache
from math import atan, cos, fsum, pi, sin, sqrt
from statistics import NormalDist, fmean, stdev

from lit_rlkv.evaluation.results import EvalRow, IntervalEstimate


def wilson(
    share: float | int, n: float | int, level: float = 0.95, z: float | None = None
) -> IntervalEstimate:
    """Return a share of n independent trials with its Wilson score interval (Wilson 1927).

    Unlike share ± z·√(share·(1 − share) / n) it stays within 0 and 1, and is no point at a share of 0 or 1.
    For means of partial scores between 0 and 1, it is too wide rather than too narrow.

    Args:
        n: number of trials; an effective number need not be whole.
        z: quantile of the standardised error; None: that of the normal distribution at this level.

    Raises:
        ValueError: n is below 1, or the share or level is outside of 0 to 1.
    """
    if not n >= 1 or not 0 <= share <= 1 or not 0 < level < 1:
        raise ValueError(
            f"a Wilson interval needs a share from 0 to 1, n of at least 1 and a level between 0 and 1, "
            f"got share={share}, n={n}, level={level}; give such numbers"
        )
    if z is None:
        z = -NormalDist().inv_cdf((1 - level) / 2)
    center = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    # Rounding may move a bound past the share itself at 0 and 1.
    return IntervalEstimate(share, min(max(center - half, 0.0), share), max(min(center + half, 1.0), share))


def clustered_share(shares: Sequence[float], n_samples: int, level: float = 0.95) -> IntervalEstimate:
    """Return the mean of each prompt's share with an interval that allows for dependent samples.

    The samples of a prompt are not independent, so they count as fewer: Wilson's interval is taken at the
    effective number n·p·(1 − p) / s², with n prompts and their variance s², and with Student's t (Franco et
    al. 2019, PMC6690503). One more prompt goes into p and s², with weight ½ as all wrong and ½ as all right:
    a few wrong answers do not tell how they cluster, and the interval would be too narrow without it.
    With one sample of each prompt it is Wilson's interval.

    Args:
        shares: between 0 and 1, one of each prompt, all estimated from `n_samples` samples.

    Raises:
        ValueError: no shares, one outside of 0 to 1, or a level outside of 0 to 1.
    """
    n = len(shares)
    if n == 0 or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"shares must be from 0 to 1, and at least one, got {shares}")
    if n_samples == 1:
        return wilson(fmean(shares), n, level)
    center = (fsum(shares) + 0.5) / (n + 1)
    variance = (fsum(share**2 for share in shares) + 0.5) / (n + 1) - center**2
    n_effective = min(max(n * center * (1 - center) / variance, n), n * n_samples)
    return wilson(fmean(shares), n_effective, level, t_quantile(level, max(n - 1, 1)))


def mean_interval(values: Sequence[float], level: float = 0.95) -> IntervalEstimate:
    """Return the mean of independent values with its interval by Student's t.

    Give one value for each prompt, since samples of one prompt are not independent (Miller 2024,
    arXiv:2411.00640). With one value, or equal values, the interval is a point and has no meaning.

    Raises:
        ValueError: no values, or a level outside of 0 to 1.
    """
    if not values or not 0 < level < 1:
        raise ValueError(
            f"a mean needs at least one value and a level between 0 and 1, got {len(values)} values and "
            f"level={level}; give such"
        )
    mean = fmean(values)
    half = t_quantile(level, len(values) - 1) * stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return IntervalEstimate(mean, mean - half, mean + half)


def accuracy_interval(row: EvalRow) -> IntervalEstimate | None:
    """Return the 95% interval of an accuracy; None without one, or beyond 0 to 1, as in older files."""
    share = -1 if row.accuracy is None else row.accuracy
    return wilson(share, row.n_problems) if 0 <= share <= 1 and row.n_problems else None


def t_level(t: float, n_free: int) -> float:
    """Return P(|T| ≤ t) of Student's t for t ≥ 0 (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    angle = atan(t / sqrt(n_free))
    is_odd = n_free % 2
    term, terms = (cos(angle) if is_odd else 1.0), []
    for k in range(1 + is_odd, n_free, 2):
        terms.append(term)
        term *= k / (k + 1) * cos(angle) ** 2
    total = sin(angle) * fsum(terms)
    return 2 / pi * (angle + total) if is_odd else total


@cache
def t_quantile(level: float, n_free: int) -> float:
    """Return the t with P(|T| ≤ t) = level, by bisection."""
    low, high = 0.0, 2.0**60
    for _ in range(120):
        middle = (low + high) / 2
        low, high = (middle, high) if t_level(middle, n_free) < level else (low, middle)
    return high
