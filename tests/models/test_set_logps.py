"""Tests of the probability of a set drawn by Gumbel top-k."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from lit_rlkv.models import set_logps as quadrature
from lit_rlkv.models.set_logps import set_logps
from tests.models import set_logps_reference as reference


def subsets(n: int, k: int) -> list[Tensor]:
    """Return all sets of k of n keys, as masks."""
    return [torch.isin(torch.arange(n), torch.tensor(one)) for one in combinations(range(n), k)]


def of_all(scores: Tensor, is_kept: Tensor) -> Tensor:
    return set_logps(scores, is_kept, torch.ones_like(is_kept))


def by_definition(scores: Tensor, is_kept: Tensor) -> Tensor:
    return reference.set_logps(scores, is_kept, torch.ones_like(is_kept))


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 12.0])
@pytest.mark.parametrize(("n", "k"), [(2, 1), (5, 1), (5, 2), (6, 5), (7, 4)])
def test_probability_and_gradient_are_those_of_all_orders(n, k, spread):
    scores = spread * torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    for is_kept in subsets(n, k):
        expected_at, found_at = (scores.clone().requires_grad_() for _ in range(2))
        expected, found = by_definition(expected_at, is_kept), of_all(found_at, is_kept)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        expected.backward()
        found.backward()
        torch.testing.assert_close(found_at.grad, expected_at.grad, rtol=0, atol=1e-6)


def test_scores_too_far_apart_for_their_exponentials_have_finite_probabilities():
    # The kept key is 150 below the other two: p = exp(−150) / (2 + exp(−150)).
    scores = torch.tensor([-150.0, 0.0, 0.0], requires_grad=True)
    logp = of_all(scores, torch.tensor([True, False, False]))
    assert float(logp.detach()) == pytest.approx(-150.0 - math.log(2), rel=1e-6)
    logp.backward()
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad, torch.tensor([1.0, -0.5, -0.5]), rtol=1e-5, atol=1e-5)
    sure = of_all(torch.tensor([150.0, 0.0, 0.0]), torch.tensor([True, False, False]))
    assert float(sure) == pytest.approx(0.0, abs=1e-5)


def test_probabilities_of_all_sets_sum_to_one():
    scores = torch.tensor([0.3, -2.0, 1.5, 0.0, 3.0, -0.5])
    total = sum(float(of_all(scores, is_kept).exp()) for is_kept in subsets(6, 3))
    assert total == pytest.approx(1.0, abs=1e-5)


def test_equal_scores_are_a_uniform_choice():
    # 1 of C(300, 120) sets
    is_kept = torch.arange(300) < 120
    expected = -(math.lgamma(301) - math.lgamma(121) - math.lgamma(181))
    assert float(of_all(torch.full((300,), 5.0), is_kept)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("n", [100, 500])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_grid_is_fine_enough_for_realistic_sets(n, spread, monkeypatch):
    """float32 against a wider grid of 8 times the density in float64; likely and unlikely sets."""
    scores = spread * torch.randn(6, n, generator=torch.Generator().manual_seed(1))
    noisy = scores - torch.empty_like(scores).exponential_(generator=torch.Generator().manual_seed(2)).log()
    noisy[3:] = torch.rand(3, n, generator=torch.Generator().manual_seed(3))  # not by the scores
    is_kept = torch.zeros(6, n, dtype=torch.bool).scatter(1, noisy.topk(n // 3, dim=1).indices, True)
    coarse, fine = scores.clone().requires_grad_(), scores.double().requires_grad_()
    found = of_all(coarse, is_kept)
    found.sum().backward()
    monkeypatch.setattr(quadrature, "N_POINTS", 16 * 48)
    monkeypatch.setattr(quadrature, "REACH", 32.0)
    expected = of_all(fine, is_kept)
    expected.sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(coarse.grad.double(), fine.grad, rtol=1e-5, atol=1e-5)


def test_comparison_catches_the_probability_of_one_order():
    """A negative control: the probability of S in one order is far from that of the set."""
    scores, is_kept = torch.tensor([1.0, 0.0, -1.0, 0.5], dtype=torch.float64), torch.arange(4) < 2
    one_order = scores[0] - scores.logsumexp(0) + scores[1] - scores[1:].logsumexp(0)
    assert abs(float(one_order - of_all(scores, is_kept))) > 0.1


def test_other_keys_are_not_read_and_no_choice_is_certain():
    scores = torch.tensor([[0.5, -1.0, torch.nan, 2.0], [1.0, 2.0, torch.inf, 3.0]], requires_grad=True)
    is_candidate = torch.tensor([[True, True, False, True], [True, True, False, True]])
    is_kept = torch.tensor([[True, False, True, False], [True, True, True, True]])
    found = set_logps(scores, is_kept, is_candidate)
    first = by_definition(scores[0, [0, 1, 3]].double(), torch.tensor([True, False, False]))
    torch.testing.assert_close(found.double(), torch.stack([first, torch.zeros_like(first)]))
    found.sum().backward()
    assert scores.grad is not None
    assert (scores.grad[1] == 0).all()
    assert scores.grad[0, 2] == 0
    assert scores.grad.isfinite().all()


def test_frequencies_of_gumbel_top_k_are_the_probabilities():
    scores, generator = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0]), torch.Generator().manual_seed(0)
    noise = torch.empty(40_000, 5).exponential_(generator=generator).log()
    drawn = (scores - noise).topk(2, dim=1).indices.sort(dim=1).values
    for pair in combinations(range(5), 2):
        share = float((drawn == torch.tensor(pair)).all(dim=1).float().mean())
        is_kept = torch.isin(torch.arange(5), torch.tensor(pair))
        assert share == pytest.approx(float(of_all(scores, is_kept).exp()), abs=0.01)
