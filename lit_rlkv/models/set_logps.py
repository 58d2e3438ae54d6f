"""Probability of a set drawn by Gumbel top-k: what an eviction that samples its survivors has chosen.

The k keys of highest s + Gumbel noise are a draw of k keys without replacement by softmax(s). They are the
set S when the lowest perturbed score of S is above the highest of the rest R, which is a Gumbel variable
with location φ = logsumexp of s over R. With g for that highest one (Kool et al. 2020, arXiv:2002.06043)

    p(S) = ∫ exp(φ − g − exp(φ − g)) · Π_{i in S} (1 − exp(−exp(s_i − g))) dg.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

N_POINTS = 48
"""Points of the grid: with them the error is below float32's rounding."""
REACH = 16.0
"""The grid ends where the logarithm of the integrand is at least so many nats below its maximum."""
SMALL = -12.0
"""Below it 1 − e⁻ˣ is x − x²/2, at x = exp(−12)."""
N_HALVINGS = 14
"""Halvings of the interval that holds the maximum, which is no wider than log(k + 1)."""


def set_logps(
    scores: Float[Tensor, "*lead key"],
    is_kept: Bool[Tensor, "*lead key"],
    is_candidate: Bool[Tensor, "*lead key"],
) -> Float[Tensor, "*lead"]:
    """Return log p(S) of the kept candidates S, with a gradient to the scores; 0 if no candidate is left out.

    The integrand is log-concave and smooth, so sums over an even grid about its maximum converge
    exponentially. One point is in memory at a time, and the gradient is a by-product of the sum. Scores of
    other keys are not read.
    """
    out: Tensor = _SetLogps.apply(scores, is_kept & is_candidate, is_candidate)  # type: ignore[no-untyped-call]
    return out


class _SetLogps(torch.autograd.Function):
    """`set_logps`; ∂/∂s_i is the mean over g of x / (eˣ − 1), x = exp(s_i − g), and shifts cancel over R."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, is_kept: Tensor, is_candidate: Tensor) -> Tensor:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        rest = scores.masked_fill(is_kept | ~is_candidate, -torch.inf)
        is_choice = (~is_kept & is_candidate).any(-1)
        location = rest.logsumexp(-1).where(is_choice, 0.0)
        kept = scores.masked_fill(~is_kept, torch.inf)  # 1 − exp(−exp(∞)) = 1
        grid, step = _grid(kept, location)
        peak = torch.full_like(location, -torch.inf)
        mass, slope = torch.zeros_like(location), torch.zeros_like(scores)
        for g in grid.unbind(0):
            log_x = kept - g[..., None]
            x = log_x.exp()
            height = _log_density(g, location) + _log_above(log_x, x).sum(-1)
            higher = torch.maximum(peak, height)
            old, new = (peak - higher).exp(), (height - higher).exp()
            mass = mass * old + new
            slope = slope * old[..., None] + new[..., None] * _rate(x)
            peak = higher
        slope = slope / mass[..., None]
        slope = torch.where(is_kept, slope, -slope.sum(-1, keepdim=True) * rest.softmax(-1).nan_to_num())
        ctx.save_for_backward(slope.masked_fill(~is_choice[..., None], 0.0))
        return (peak + mass.log() + step.log()).masked_fill(~is_choice, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * upstream[..., None], None, None


def _rate(x: Tensor) -> Tensor:
    """Return x / (eˣ − 1), the derivative of log(1 − exp(−exp(s))) by s = log x; 0 at ∞ and 1 at 0."""
    return torch.where(x > 0, x / torch.expm1(x), 1.0).nan_to_num(nan=0.0)


def _log_above(log_x: Tensor, x: Tensor) -> Tensor:
    """Return log(1 − e⁻ˣ), also where x has no float but 0."""
    return torch.where(log_x < SMALL, log_x - x / 2, torch.log(-torch.expm1(-x)))


def _log_density(g: Tensor, location: Tensor) -> Tensor:
    return location - g - (location - g).exp()


def _grid(kept: Tensor, location: Tensor) -> tuple[Tensor, Tensor]:
    """Return the points [point, *lead] and the distance between them.

    At the maximum g₀, exp(φ − g₀) = A for A = 1 + Σ x / (eˣ − 1). From there the logarithm falls by at least
    A·(d − 1 + e⁻ᵈ) to the right, and by A·(eᵈ − 1 − d) to the left, which bounds both ends of the grid.
    """
    n_kept = (kept < torch.inf).sum(-1)
    low, high = location - (n_kept + 1.0).log(), location
    for _ in range(N_HALVINGS):
        middle = (low + high) / 2
        steepness = 1 + _rate((kept - middle[..., None]).exp()).sum(-1)
        is_left = location - middle > steepness.log()
        low, high = torch.where(is_left, middle, low), torch.where(is_left, high, middle)
    peak = (low + high) / 2
    fall = REACH * (peak - location).exp()  # REACH / A
    left, right = (1 + fall + (2 * fall).sqrt()).log(), fall + (2 * fall).sqrt()
    step = (left + right) / (N_POINTS - 1)
    place = torch.arange(N_POINTS, device=kept.device, dtype=kept.dtype)
    return (peak - left) + place.view(-1, *[1] * step.ndim) * step, step
