"""pass@k: the chance that at least one of k responses to a prompt is right."""

from math import comb


def pass_at_k(n_samples: int, n_right: int, k: int) -> float:
    """Its unbiased estimate from `n_samples` responses to one prompt: 1 − C(n − c, k) / C(n, k).

    Chen et al. 2021, arXiv:2107.03374. The share of k-sets of the samples that hold a right one, in exact
    integers up to one division.

    Raises:
        ValueError: k is not one to `n_samples`, or more are right than there are samples.
    """
    if not 1 <= k <= n_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {n_samples} samples; give k from 1 to n_samples")
    if not 0 <= n_right <= n_samples:
        raise ValueError(f"n_right={n_right} of n_samples={n_samples} cannot be; count right samples")
    n_sets = comb(n_samples, k)
    return (n_sets - comb(n_samples - n_right, k)) / n_sets
