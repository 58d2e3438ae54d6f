"""Policy losses of verl beside the clipped ones, as gains of response tokens: `algorithm.loss.gain`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.checks import Number, Range
from lit_rlkv.objectives.clipped import Surrogate, clipped_surrogate, sequence_log_ratio
from lit_rlkv.objectives.kl import MAX_LOG_RATIO
from lit_rlkv.objectives.reduction import masked_mean


@dataclass(frozen=True)
class Tokens:
    """Whole rows, as a gain reads them."""

    logps: Float[Tensor, "batch seq"]
    """log π, with its gradient."""
    old_logps: Float[Tensor, "batch seq"]
    advantages: Float[Tensor, "batch seq"]
    response_mask: Bool[Tensor, "batch seq"]
    is_chosen: Bool[Tensor, "batch seq"]
    """Tokens that `by_covariance` has chosen."""

    @property
    def log_ratio(self) -> Float[Tensor, "batch seq"]:
        """log π − log π_old, bounded as in verl."""
        return (self.logps - self.old_logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


Gain = Callable[[Tokens], Surrogate]


def dppo_tv(tokens: Tokens, low: Number = 0.15, high: Number = 0.15, cap: Number = 1e4) -> Surrogate:
    """Return sg(min(ratio, cap))·A·log π without tokens whose π moved too far along A (arXiv:2602.04879).

    It moved too far if A > 0 and π − π_old > high, or else if π − π_old < −low. The defaults are those of
    verl's script; verl's YAML has 0.2, and a cap of 3, which binds for tokens that were rare.
    """
    return _within(tokens, tokens.logps.exp() - tokens.old_logps.exp(), low, high, cap)


def dppo_kl(tokens: Tokens, low: Number = 0.05, high: Number = 0.05, cap: Number = 1e4) -> Surrogate:
    """Return the gain of `dppo_tv`, with the KL(π_old ‖ π) of "this token or another" as the distance.

    verl takes the bounds from `clip_ratio`, whose default of 0.2 is four times the paper's.
    """
    new, old = tokens.logps, tokens.old_logps
    # A log-prob near 0 may be rounded to above it.
    of_old, of_new = ((1 - logps.exp()).clamp(min=0) for logps in (old, new))
    kl = old.exp() * (old - new) + of_old * ((of_old + 1e-8) / (of_new + 1e-8)).log()
    return _within(tokens, kl * (new - old).sign(), low, high, cap)


def _within(tokens: Tokens, distance: Tensor, low: Number, high: Number, cap: Number) -> Surrogate:
    is_good = tokens.advantages > 0
    is_low, is_high = (distance < -low) & ~is_good, (distance > high) & is_good
    weight = tokens.log_ratio.detach().exp().clamp(max=cap).masked_fill(is_low | is_high, 0.0)
    return _gained(weight * tokens.advantages * tokens.logps, is_low, is_high)


def sapo(tokens: Tokens, tau_pos: Number = 1.0, tau_neg: Number = 1.05) -> Surrogate:
    """Return A·(4/τ)·σ(τ·(ratio − 1)), τ = tau_pos where A > 0, else tau_neg (arXiv:2511.20347).

    The paper averages over responses; verl's default of `loss_agg_mode`, token-mean, is another loss.
    """
    tau = torch.where(tokens.advantages > 0, float(tau_pos), float(tau_neg)).to(tokens.logps.dtype)
    return _gained(tokens.advantages * 4 / tau * (tau * tokens.log_ratio.expm1()).sigmoid())


def gpg(tokens: Tokens) -> Surrogate:
    """Return A·log π (arXiv:2504.02546): no ratio, so that nothing bounds further steps on a rollout."""
    return _gained(tokens.advantages * tokens.logps)


def geo_mean(tokens: Tokens, low: Number = 0.4, high: Number = 0.4) -> Surrogate:
    """Return A·exp(mean over the response of the clipped log-ratios) (GMPO, arXiv:2507.20673).

    Log-ratios are clipped to [−low, high] where that lowers the objective. verl takes the bounds from
    `clip_ratio`, 0.2, half of the paper's.
    """
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    is_low, is_high = (log_ratio < -low) & (advantages < 0), (log_ratio > high) & (advantages > 0)
    bounded = torch.where(is_low | is_high, log_ratio.clamp(-low, high), log_ratio)
    return _gained(advantages * sequence_log_ratio(bounded, tokens.response_mask).exp(), is_low, is_high)


def clip_cov(tokens: Tokens, low: Number = 0.2, high: Number = 0.2) -> Surrogate:
    """Return PPO's gain with clips `low` and `high`, 0 at the chosen tokens (Clip-Cov, arXiv:2505.22617)."""
    advantages = tokens.advantages.masked_fill(tokens.is_chosen, 0.0)
    return clipped_surrogate(tokens.log_ratio, advantages, low, high)


def kl_cov(tokens: Tokens, coef: Number = 1.0) -> Surrogate:
    """Return ratio·A − coef·|log ratio| at the chosen tokens, ratio·A elsewhere (KL-Cov, arXiv:2505.22617).

    At ratio 1 the penalty has no gradient, so it needs several steps on a rollout. verl's default of `coef`
    is 0.1, where its own docstring and the paper say 1.
    """
    penalty = (coef * tokens.log_ratio.abs()).masked_fill(~tokens.is_chosen, 0.0)
    return _gained(tokens.log_ratio.exp() * tokens.advantages - penalty)


def by_covariance(
    advantages: Float[Tensor, "batch seq"],
    logps: Float[Tensor, "batch seq"],
    is_counted: Bool[Tensor, "batch seq"],
    generator: torch.Generator | None,
    share: Number = 2e-4,
    between: list[float] | None = None,
) -> Bool[Tensor, "batch seq"]:
    """Choose a share of the counted tokens, at least one, by (A − mean A)·(log π − mean log π).

    They are those of the highest, or random ones between two bounds. verl chooses in each micro-batch, at
    least one token, so small ones choose many times the share; here the rollout is one batch.
    """
    Range(above=0, most=1).check("share", share)
    if between is not None and not (len(between) == 2 and between[0] < between[1]):
        raise ValueError(f"between must be two numbers, the smaller one first, got {between}; change it")
    centred = (values - masked_mean(values, is_counted) for values in (advantages, logps))
    score = torch.mul(*centred).masked_fill(~is_counted, -torch.inf)
    if between is not None:
        low, high = between
        draws = torch.rand(score.shape, generator=generator).to(score)
        score = torch.where((score > low) & (score < high), draws, -torch.inf)
    n_counted = int(is_counted.sum())
    best = score.flatten().topk(min(max(int(share * n_counted), 1), n_counted))
    is_chosen = torch.zeros_like(is_counted).flatten()
    is_chosen[best.indices] = best.values > -torch.inf
    return is_chosen.view_as(is_counted)


def _gained(gain: Tensor, is_low: Tensor | None = None, is_high: Tensor | None = None) -> Surrogate:
    none = torch.zeros_like(gain, dtype=torch.bool)
    return Surrogate(gain, none if is_low is None else is_low, none if is_high is None else is_high, none)
