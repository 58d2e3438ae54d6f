"""Definition of the probability of a set drawn without replacement: the sum over all orders."""

from itertools import permutations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def set_logps(
    scores: Float[Tensor, "*lead key"],
    is_kept: Bool[Tensor, "*lead key"],
    is_candidate: Bool[Tensor, "*lead key"],
) -> Float[Tensor, "*lead"]:
    """Return log p(S) of the kept candidates S, by the k! orders in which they can be drawn one by one."""
    n_keys = scores.shape[-1]
    rows = zip(*(each.reshape(-1, n_keys) for each in (scores, is_kept, is_candidate)), strict=True)
    return torch.stack([_of_row(*row) for row in rows]).view(scores.shape[:-1])


def _of_row(scores: Tensor, is_kept: Tensor, is_candidate: Tensor) -> Tensor:
    kept = (is_kept & is_candidate).nonzero().flatten().tolist()
    orders = []
    for order in permutations(kept):
        is_left, logp = is_candidate, scores.new_zeros(())
        for key in order:
            logp = logp + scores[key] - scores.masked_fill(~is_left, -torch.inf).logsumexp(0)
            is_left = is_left & (torch.arange(len(scores), device=scores.device) != key)
        orders.append(logp)
    return torch.stack(orders).logsumexp(0)
