"""Losses of verl 0.9 (core_algos.py) as its code defines them, in float64, with gradients by autograd.

Columns outside the responses hold NaN, which no loss may notice.
"""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from lit_rlkv.experience.advantages import GroupAdvantage
from lit_rlkv.objectives.gains import (
    Tokens,
    by_covariance,
    clip_cov,
    dppo_kl,
    dppo_tv,
    geo_mean,
    gpg,
    kl_cov,
    sapo,
)
from lit_rlkv.objectives.reduction import AGGREGATIONS, weighted_sum
from tests.objectives.test_published_losses import (
    ADVANTAGES,
    IS_ACTION,
    LENGTHS,
    MAX_NEW_TOKENS,
    OLD_LOGPS,
    START,
    assert_equal,
    differs,
    loss_and_gradient,
)

SHIFT = -1.2  # no probability above 1
OLD, NEW = OLD_LOGPS + SHIFT, START + SHIFT
IS_CHOSEN = IS_ACTION & (torch.arange(IS_ACTION.numel()).view_as(IS_ACTION) % 3 == 0)


def ours(gain, aggregation, **options):
    weight = AGGREGATIONS[aggregation](IS_ACTION, MAX_NEW_TOKENS).double()

    def loss(logps: Tensor) -> Tensor:
        found = gain(Tokens(logps + SHIFT, OLD, ADVANTAGES, IS_ACTION, IS_CHOSEN), **options)
        return -weighted_sum(found.gain, weight)

    return loss_and_gradient(loss)


def theirs(token_losses, aggregation):
    """Sum their loss of each token by the definitions of verl's `agg_loss`, row by row."""

    def loss(logps: Tensor) -> Tensor:
        rows = []
        for row, length in enumerate(LENGTHS):
            here = slice(2, 2 + length)
            inputs = (logps[row, here] + SHIFT, OLD[row, here], ADVANTAGES[row, here], IS_CHOSEN[row, here])
            rows.append(token_losses(*inputs).expand(length))
        means = {
            "token": torch.cat(rows).mean(),
            "sequence": torch.stack([row.mean() for row in rows]).mean(),
            "constant": torch.stack([row.sum() for row in rows]).mean() / MAX_NEW_TOKENS,
        }
        return means[aggregation]

    return loss_and_gradient(loss)


def verl_dppo(logps, old, advantages, is_valid, cap):
    ratio = (logps - old).clamp(-20, 20).exp().clamp(max=cap).detach()
    return -advantages * ratio * logps * is_valid.double()


def verl_dppo_tv(logps, old, advantages, _):
    change = logps.detach().exp() - old.exp()
    is_valid = torch.where(advantages > 0, change <= 0.06, change >= -0.04)
    return verl_dppo(logps, old, advantages, is_valid, 1.3)


def verl_dppo_kl(logps, old, advantages, _):
    p, q = logps.detach().exp(), old.exp()
    kl = q * (old - logps.detach()) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
    is_valid = torch.where(advantages > 0, (kl <= 0.02) | (p <= q), (kl <= 0.01) | (p >= q))
    return verl_dppo(logps, old, advantages, is_valid, 1.3)


def verl_sapo(logps, old, advantages, _):
    tau = torch.where(advantages > 0, 1.0, 1.05).double()
    return -torch.sigmoid(tau * ((logps - old).exp() - 1)) * (4 / tau) * advantages


def verl_gpg(logps, old, advantages, _):
    return -logps * advantages


def verl_geo_mean(logps, old, advantages, _):
    sign, log_ratio = torch.sign(advantages), logps - old
    least = torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-0.4, 0.3)) * sign
    return -advantages.mean() * least.mean().exp()


def verl_clip_cov(logps, old, advantages, is_chosen):
    ratio = (logps - old).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.3))
    return losses * (~is_chosen).double()


def verl_kl_cov(logps, old, advantages, is_chosen):
    ratio, distance = (logps - old).exp(), (logps - old).abs()
    return torch.where(is_chosen, -advantages * ratio + 0.7 * distance, -advantages * ratio)


LOSSES = {
    "dppo_tv": (dppo_tv, {"low": 0.04, "high": 0.06, "cap": 1.3}, verl_dppo_tv, {"low": 0.06}),
    "dppo_kl": (dppo_kl, {"low": 0.01, "high": 0.02, "cap": 1.3}, verl_dppo_kl, {"cap": 1.2}),
    "sapo": (sapo, {}, verl_sapo, {"tau_neg": 1.5}),
    "gpg": (gpg, {}, verl_gpg, None),
    "geo_mean": (geo_mean, {"low": 0.4, "high": 0.3}, verl_geo_mean, {"high": 0.5}),
    "clip_cov": (clip_cov, {"low": 0.2, "high": 0.3}, verl_clip_cov, {"high": 0.5}),
    "kl_cov": (kl_cov, {"coef": 0.7}, verl_kl_cov, {"coef": 1.0}),
}


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_verl(name, aggregation):
    gain, options, published, other = LOSSES[name]
    expected = theirs(published, aggregation)
    assert_equal(ours(gain, aggregation, **options), expected)
    twin = ours(gain, aggregation, **options | other) if other else ours(sapo, aggregation)
    assert max(abs(a - b) for a, b in zip(twin[1], expected[1], strict=True)) > 1e-3
    wrong = "token" if aggregation != "token" else "sequence"
    assert differs(ours(gain, wrong, **options), expected)


@pytest.mark.parametrize(("gain", "options"), [(dppo_tv, {"low": 0.04, "high": 0.06}), (geo_mean, {})])
def test_tokens_count_as_clipped_where_they_have_no_gradient(gain, options):
    logps = NEW.clone().requires_grad_()
    found = gain(Tokens(logps, OLD, ADVANTAGES, IS_ACTION, IS_CHOSEN), **options)
    (gradient,) = torch.autograd.grad(weighted_sum(found.gain, IS_ACTION.double()), logps)
    is_clipped = found.is_clipped_low | found.is_clipped_high
    assert torch.equal((gradient == 0)[IS_ACTION], is_clipped[IS_ACTION])
    assert set(is_clipped[IS_ACTION].tolist()) == {True, False}


def test_a_probability_that_is_rounded_to_above_one_is_as_far_away_as_one():
    logps = torch.tensor([[1e-7, 0.0]])  # exp of the first is above 1 in float32
    old, everywhere = torch.full_like(logps, math.log(0.5)), torch.ones(1, 2, dtype=torch.bool)
    found = dppo_kl(Tokens(logps, old, torch.ones_like(logps), everywhere, ~everywhere))
    assert logps.exp()[0, 0] > 1
    assert found.is_clipped_high.all()


def covariances() -> Tensor:
    advantages, logps = ADVANTAGES[IS_ACTION], OLD[IS_ACTION]
    return (advantages - advantages.mean()) * (logps - logps.mean())


@pytest.mark.parametrize("share", [1e-9, 0.1, 0.5, 1.0])
def test_the_tokens_of_the_highest_covariance_are_those_of_verls_kl_cov(share):
    found = by_covariance(ADVANTAGES, OLD, IS_ACTION, None, share)
    n = max(int(share * 32), 1)  # of 32 tokens
    best = covariances().topk(n).indices
    assert torch.equal(found[IS_ACTION].nonzero().flatten(), best.sort().values)
    assert not found[~IS_ACTION].any()


def test_random_tokens_of_a_band_of_covariances_are_chosen_as_in_verls_clip_cov():
    is_between = (covariances() > 0.1) & (covariances() < 0.6)
    drawn = [
        by_covariance(ADVANTAGES, OLD, IS_ACTION, torch.Generator().manual_seed(seed), 0.1, [0.1, 0.6])
        for seed in range(40)
    ]
    assert is_between.sum() > 3
    assert all(int(one.sum()) == 3 for one in drawn)  # a tenth of 32
    assert torch.equal(torch.stack(drawn).any(dim=0)[IS_ACTION], is_between)
    few = by_covariance(ADVANTAGES, OLD, IS_ACTION, None, 1.0, [0.1, 0.6])
    assert torch.equal(few[IS_ACTION], is_between)
    assert not by_covariance(ADVANTAGES, OLD, IS_ACTION, None, 1.0, [100.0, 200.0]).any()
    assert not by_covariance(ADVANTAGES, OLD, torch.zeros_like(IS_ACTION), None).any()


@pytest.mark.parametrize("gain", [one[0] for one in LOSSES.values()])
def test_ratios_beyond_the_range_of_floats_have_finite_gradients(gain):
    # Chosen tokens of size 1; bounds as wide as they can be.
    for logps, old in [(-800.0, -1.0), (-1.0, -800.0)]:
        new = torch.full((1, 2), logps, dtype=torch.float64, requires_grad=True)
        mask = torch.ones(1, 2, dtype=torch.bool)
        advantages = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
        gain(Tokens(new, torch.full_like(new, old).detach(), advantages, mask, mask)).gain.sum().backward()
        assert new.grad.isfinite().all()


@pytest.mark.parametrize(
    "options",
    [{"share": 0}, {"share": 1.5}, {"share": math.nan}, {"between": [1.0]}, {"between": [5.0, 1.0]}],
)
def test_choices_out_of_range_are_refused_before_any_work(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        GroupAdvantage("grpo", choose=partial(by_covariance, **options))
