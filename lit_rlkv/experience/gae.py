"""Generalised advantage estimation: a value function gives every response token an advantage of its own.

Columns are those of a rollout. The actions of a row stand in contiguous columns, and the value of a column is
V of the state before its action. An episode ends with its last action: V after it is 0.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.experience.group_baselines import STD_FLOOR
from lit_rlkv.objectives.reduction import masked_mean, masked_sum


def token_rewards(
    total: Float[Tensor, " batch"],
    response_mask: Bool[Tensor, "batch seq"],
    kl_penalty: Float[Tensor, "batch seq"],
) -> Float[Tensor, "batch seq"]:
    """Return r_t = −β·KL_t, plus the total reward at the last response token (arXiv:1909.08593).

    Args:
        kl_penalty: β·KL of each response token.
    """
    is_last = response_mask & ~F.pad(response_mask[:, 1:], (0, 1))
    return torch.where(is_last, total[:, None], 0.0) - kl_penalty.masked_fill(~response_mask, 0.0)


def gae(
    rewards: Float[Tensor, "batch seq"],
    values: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
    *,
    gamma: float | int,
    lam: float | int,
) -> Float[Tensor, "batch seq"]:
    """A_t = δ_t + γλ·A_{t+1}, with δ_t = r_t + γ·V_{t+1} − V_t (arXiv:1506.02438); 0 outside `response_mask`.

    λ = 1 gives the discounted return less the value, λ = 0 the one-step error of the value.
    """
    values = values.masked_fill(~response_mask, 0.0)
    delta = rewards + gamma * F.pad(values[:, 1:], (0, 1)) - values
    # A prompt's last column sees the first action's value, but is no action itself.
    advantages = discounted_sums(delta.masked_fill(~response_mask, 0.0), gamma * lam)
    return advantages.masked_fill(~response_mask, 0.0)


def discounted_sums(values: Float[Tensor, "batch seq"], discount: float | int) -> Float[Tensor, "batch seq"]:
    """Σ_n discount^n · value[t + n] at each column t, over all columns from t on.

    In log₂(seq) steps, each of which doubles how far the sums reach.
    """
    reach = 1
    while reach < values.shape[1]:
        values = values + discount**reach * F.pad(values[:, reach:], (0, reach))
        reach *= 2
    return values


def returns(
    advantages: Float[Tensor, "batch seq"],
    values: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
) -> Float[Tensor, "batch seq"]:
    """A + V, what the value function learns from (the λ-return); 0 outside `response_mask`.

    Takes the advantages as `gae` gives them, before they are whitened.
    """
    return torch.where(response_mask, advantages + values, 0.0)


def whiten(
    advantages: Float[Tensor, "batch seq"], is_counted: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """(A − mean) / std over all counted tokens, unbiased std; 0 elsewhere, and where all are equal."""
    centred = (advantages - masked_mean(advantages, is_counted)).masked_fill(~is_counted, 0.0)
    variance = masked_sum(centred.square(), is_counted) / (is_counted.sum() - 1).clamp(min=1)
    return centred / (variance.sqrt() + STD_FLOOR)


def explained_variance(
    values: Float[Tensor, "batch seq"],
    returns: Float[Tensor, "batch seq"],
    response_mask: Bool[Tensor, "batch seq"],
) -> Float[Tensor, ""]:
    """1 − Var(returns − values) / Var(returns) over response tokens: 1 is perfect, 0 as good as a constant.

    Negative for values that are worse than a constant; 0 where the returns do not vary.
    """
    target, error = returns[response_mask], (returns - values)[response_mask]
    if (target == target[:1]).all():
        return target.new_zeros(())
    return 1 - error.var() / target.var()
