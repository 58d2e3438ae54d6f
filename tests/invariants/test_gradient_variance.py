"""Invariant 7: on a bandit, whose gradient can be enumerated, the estimates of its variance have no bias."""

from dataclasses import dataclass
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from lit_rlkv.diagnostics.covariance import PartGradients
from lit_rlkv.experience.group_baselines import ESTIMATORS, Groups
from lit_rlkv.rng import stream

LOGITS = torch.tensor([[0.5, 0.0, -1.0], [-0.3, 0.4, 0.2]], dtype=torch.float64)
"""Two prompts, equally frequent, with three answers each."""
REWARDS = torch.tensor([[1.0, 0.0, 0.5], [0.0, 2.0, 1.0]], dtype=torch.float64)
GROUP_SIZE = 3
SIZES = (1, 3, 2, 2)
"""Groups in the parts of a rollout."""
N_GROUPS = sum(SIZES)
N_DRAWS = 1500
ALGORITHMS = ("dr_grpo", "rloo", "grpo")


def group_gradients(prompts: Tensor, answers: Tensor, algorithm: str) -> Tensor:
    """[group, response, logit] terms A·∇ log π(answer), whose mean over a group is its gradient."""
    score = torch.eye(3, dtype=torch.float64)[answers] - LOGITS.softmax(-1)[prompts][:, None]
    rewards = REWARDS[prompts[:, None], answers]
    ones = torch.ones_like(rewards)
    advantages = ESTIMATORS[algorithm](Groups(rewards, ones.bool(), ones.int(), {}, {}))
    terms = torch.zeros(*answers.shape, 2, 3, dtype=torch.float64)
    index = prompts[:, None, None, None].expand(-1, GROUP_SIZE, 1, 3)
    return terms.scatter_(2, index, (advantages[..., None] * score)[:, :, None]).flatten(2)


@dataclass(frozen=True)
class Exact:
    variance: float
    """Return the variance of the gradient of a rollout of N_GROUPS groups."""
    signal: float


@cache
def enumerated(algorithm: str) -> Exact:
    """Over both prompts and all 27 groups of answers, each with its probability."""
    outcomes = list(product(range(2), *[range(3)] * GROUP_SIZE))
    prompts = torch.tensor([outcome[0] for outcome in outcomes])
    answers = torch.tensor([outcome[1:] for outcome in outcomes])
    chances = 0.5 * LOGITS.softmax(-1)[prompts[:, None], answers].prod(dim=1)
    gradients = group_gradients(prompts, answers, algorithm).mean(dim=1)
    mean = (chances[:, None] * gradients).sum(dim=0)
    of_group = (chances * (gradients - mean).square().sum(dim=1)).sum()
    assert chances.sum().item() == pytest.approx(1.0)
    return Exact(float(of_group) / N_GROUPS, float(mean.square().sum()))


@cache
def rollouts(algorithm: str) -> Tensor:
    """[draw, group, response, logit] terms of as many rollouts."""
    generator = stream(0, "bandit")
    prompts = torch.randint(2, (N_DRAWS * N_GROUPS,), generator=generator)
    answers = torch.multinomial(
        LOGITS.softmax(-1)[prompts], GROUP_SIZE, replacement=True, generator=generator
    )
    return group_gradients(prompts, answers, algorithm).view(N_DRAWS, N_GROUPS, GROUP_SIZE, -1)


@cache
def estimates(algorithm: str, breaks_groups: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Variance, signal and stated error found from the parts of each rollout."""
    found = []
    for terms in rollouts(algorithm):
        if breaks_groups:  # the same responses, each group spread over the parts
            terms = terms.transpose(0, 1).reshape(N_GROUPS, GROUP_SIZE, -1)
        parts = PartGradients()
        for part in terms.split(SIZES):
            parts.add({"logits": part.mean(dim=(0, 1))}, len(part))
        spread = parts.spread()
        assert spread is not None
        found.append([float(spread.variance), float(spread.signal), spread.variance_se])
    variance, signal, error = torch.tensor(found, dtype=torch.float64).unbind(1)
    return variance, signal, error


def errors_off(found: Tensor, expected: float) -> float:
    """Return the error of the mean of estimates, in standard errors."""
    return abs(float((found.mean() - expected) / (found.std() / len(found) ** 0.5)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_variance_and_signal_have_no_bias_on_a_bandit(algorithm: str):
    exact = enumerated(algorithm)
    variance, signal, _ = estimates(algorithm)
    assert errors_off(variance, exact.variance) < 3.5
    assert errors_off(signal, exact.signal) < 3.5
    # so that a bias of a few per cent would have been seen
    assert variance.std() / len(variance) ** 0.5 < 0.03 * exact.variance


def test_enumerated_variance_matches_fresh_rollouts():
    gradients = rollouts("rloo").mean(dim=(1, 2))
    squares = (gradients - gradients.mean(dim=0)).square().sum(dim=1)
    assert errors_off(squares, enumerated("rloo").variance) < 3.5


def test_the_comparison_catches_a_division_by_the_number_of_parts():
    variance, _, _ = estimates("rloo")
    biased = variance * (len(SIZES) - 1) / len(SIZES)
    assert errors_off(biased, enumerated("rloo").variance) > 10


def test_the_comparison_catches_parts_that_break_groups():
    variance, _, _ = estimates("rloo", breaks_groups=True)
    assert errors_off(variance, enumerated("rloo").variance) > 10


def test_the_comparison_catches_a_signal_that_still_holds_the_noise():
    variance, signal, _ = estimates("rloo")
    assert errors_off(signal + variance, enumerated("rloo").signal) > 10


def test_the_stated_error_is_about_the_scatter_of_the_estimates():
    variance, _, error = estimates("rloo")
    # three contrasts a rollout know their own scatter poorly, but their mean square knows it
    assert float(error.square().mean().sqrt()) == pytest.approx(float(variance.std()), rel=0.2)


N_PARTS = 32
N_PER_PART = 4
"""Prompts in each part of a rollout whose loss is a mean over tokens."""


def lengths_and_sums(n_draws: int) -> tuple[Tensor, Tensor]:
    """[draw, part, prompt] tokens, a quarter of them 8 and the others 1, and [..., 3] sums of gradients."""
    generator = stream(0, "lengths")
    is_long = torch.rand(n_draws, N_PARTS, N_PER_PART, generator=generator) < 0.25
    lengths = torch.where(is_long, 8.0, 1.0).double()
    noise = torch.randn(*lengths.shape, 3, generator=generator, dtype=torch.float64)
    # long responses point elsewhere than short ones, and what is random grows with them
    return lengths, 3 * lengths[..., None] - 2.75 + lengths[..., None] * noise


@cache
def of_ratios(takes_parts_alone: bool) -> Tensor:
    """The variance that is found from each of 300 rollouts."""
    found = []
    for lengths, sums in zip(*lengths_and_sums(300), strict=True):
        parts = PartGradients()
        for its_lengths, its_sums in zip(lengths, sums, strict=True):
            if takes_parts_alone:  # a step of its own, and no word of the denominator
                parts.add({"x": its_sums.sum(dim=0) / its_lengths.sum()}, N_PER_PART)
            else:
                share = float(its_lengths.sum() / lengths.sum())
                parts.add({"x": its_sums.sum(dim=0) / lengths.sum()}, N_PER_PART, share)
        spread = parts.spread()
        assert spread is not None
        found.append(float(spread.variance))
    return torch.tensor(found, dtype=torch.float64)


def test_the_variance_of_a_mean_over_tokens_of_varying_lengths_has_no_bias_that_could_be_seen():
    lengths, sums = lengths_and_sums(4000)
    gradients = sums.sum(dim=(1, 2)) / lengths.sum(dim=(1, 2))[:, None]
    squares = (gradients - gradients.mean(dim=0)).square().sum(dim=1)
    truth, its_error = float(squares.mean()), float(squares.std()) / len(squares) ** 0.5

    def off(found: Tensor) -> float:
        error = float(found.std()) / len(found) ** 0.5
        return abs(float(found.mean()) - truth) / (error**2 + its_error**2) ** 0.5

    assert off(of_ratios(takes_parts_alone=False)) < 3.5
    assert its_error < 0.03 * truth
    # parts with denominators of their own are ratios of four prompts, which vary more than ratios of all
    alone = of_ratios(takes_parts_alone=True)
    assert off(alone) > 10
    assert float(alone.mean()) > 1.1 * truth
