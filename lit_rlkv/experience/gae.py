"""Generalised advantage estimation: per-token advantages from a value function.

Tensors have the columns of a rollout, and the value of a column is V of the state before its token. Time goes
from one response token to the next, whatever was given between them. V after the last response token is 0.
"""

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.objectives.reduction import response_first

STD_FLOOR = 1e-4
"""Added to the standard deviation, as in TRL. Equal rewards have advantage 0, however large they are, because
`centred` leaves no rounding error for this small number to magnify."""


def token_rewards(
    total: Float[Tensor, " batch"],
    response_mask: Bool[Tensor, "batch seq"],
    kl_penalty: Float[Tensor, "batch seq"],
) -> Float[Tensor, "batch seq"]:
    """Return r_t = −β·KL_t, plus the total reward at the last response token (arXiv:1909.08593).

    Args:
        kl_penalty: β·KL of each response token.
    """
    is_last = response_mask & (response_mask.flip(1).cumsum(dim=1).flip(1) == 1)
    return torch.where(is_last, total[:, None], 0.0) - kl_penalty.masked_fill(~response_mask, 0.0)


def gae(
    rewards: Float[Tensor, "batch seq"],
    values: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
    *,
    gamma: float | int,
    lam: float | int,
) -> Float[Tensor, "batch seq"]:
    """Return A_t = δ_t + γλ·A_{t+1} with δ_t = r_t + γ·V_{t+1} − V_t (arXiv:1506.02438).

    It is 0 outside `response_mask`. λ = 1 gives the discounted return minus the value, λ = 0 the one-step
    error of the value.
    """
    values, order = values.masked_fill(~response_mask, 0.0), response_first(response_mask)
    next_values = F.pad(values.gather(1, order)[:, 1:], (0, 1))
    next_values = torch.zeros_like(values).scatter(1, order, next_values)
    delta = rewards + gamma * next_values - values
    return discounted_sums(delta, response_mask, gamma * lam)


def discounted_sums(
    values: Float[Tensor, "batch seq"], response_mask: Bool[Tensor, "batch seq"], discount: float | int
) -> Float[Tensor, "batch seq"]:
    """Return Σ_n discount^n · value[t + n] for each response token t; 0 elsewhere.

    t + n is the n-th response token after t. It takes log₂(seq) steps; each doubles the length of the sums.
    """
    order = response_first(response_mask)
    sums = values.masked_fill(~response_mask, 0.0).gather(1, order)
    reach = 1
    while reach < sums.shape[1]:
        sums = sums + discount**reach * F.pad(sums[:, reach:], (0, reach))
        reach *= 2
    return torch.zeros_like(values).scatter(1, order, sums).masked_fill(~response_mask, 0.0)


def returns(
    advantages: Float[Tensor, "batch seq"],
    values: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
) -> Float[Tensor, "batch seq"]:
    """Return A + V (the λ-return), the target of the value function; 0 outside `response_mask`.

    The advantages must not be whitened.
    """
    return torch.where(response_mask, advantages + values, 0.0)


def centred(
    values: Float[Tensor, "*shape"], weights: Num[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "*shape"]:
    """Return values less their weighted mean, along `dim` or over all; 0 where the weight is 0."""
    is_in, dims = weights > 0, tuple(range(values.ndim)) if dim is None else (dim,)
    # Differences of equal numbers are 0; their mean is rounded, so subtracting it alone would leave a rest.
    least = values.masked_fill(~is_in, torch.inf).amin(dims, keepdim=True)
    differences = (values - least).masked_fill(~is_in, 0.0)
    total = weights.sum(dims, keepdim=True).clamp(min=1)
    return (differences - (weights * differences).sum(dims, keepdim=True) / total).masked_fill(~is_in, 0.0)


def standard_deviation(
    values: Float[Tensor, "*shape"], is_counted: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "*shape"]:
    """Return the unbiased standard deviation of the counted entries, in all dimensions; 0 of a single one."""
    dims = tuple(range(values.ndim)) if dim is None else (dim,)
    squares = centred(values, is_counted, dim).square().sum(dims, keepdim=True)
    return (squares / (is_counted.sum(dims, keepdim=True) - 1).clamp(min=1)).sqrt()


def whiten(
    values: Float[Tensor, "*shape"], is_counted: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "*shape"]:
    """Return (value − mean) / std of the counted entries; 0 elsewhere, or if all are equal; see `centred`."""
    return centred(values, is_counted, dim) / (standard_deviation(values, is_counted, dim) + STD_FLOOR)


def explained_variance(
    values: Float[Tensor, "batch seq"],
    returns: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
) -> Float[Tensor, ""]:
    """Return 1 − Var(returns − values) / Var(returns) over response tokens; 1 is perfect.

    A constant value has 0, a worse one is negative; 0 if the returns do not vary.
    """
    target, error = returns[response_mask], (returns - values)[response_mask]
    if (target == target[:1]).all():
        return target.new_zeros(())
    return 1 - error.var() / target.var()
