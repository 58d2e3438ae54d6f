import math

import pytest
import torch

from lit_rlkv.objectives.kl import ESTIMATORS, LOSSES, adapted_weight, k1, k2, k3

P = torch.tensor([0.5, 0.3, 0.2])
REF = torch.tensor([0.2, 0.3, 0.5])


def test_estimators_match_hand_arithmetic():
    # π = 1/2, reference = 1/4: log π − log ref = log 2.
    logps, ref_logps = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    assert k1(logps, ref_logps).item() == pytest.approx(math.log(2))
    assert k2(logps, ref_logps).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(logps, ref_logps).item() == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_have_the_kl_as_their_mean_under_the_policy(name: str):
    kl = (P * (P / REF).log()).sum()
    torch.testing.assert_close((P * ESTIMATORS[name](P.log(), REF.log())).sum(), kl)


def test_k2_is_biased():
    kl = (P * (P / REF).log()).sum()
    assert abs((P * k2(P.log(), REF.log())).sum() - kl) > 0.01


def test_k2_has_the_gradient_of_the_kl():
    # The score-function gradient Σ p ∇(½ log²(p/ref)) = Σ p log(p/ref) ∇log p = ∇KL.
    logits = P.log().requires_grad_()
    logps = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logps.exp() * (logps - REF.log())).sum(), logits, retain_graph=True)
    (estimated,) = torch.autograd.grad((P * k2(logps, REF.log())).sum(), logits)
    torch.testing.assert_close(estimated, exact)


def test_k3_is_never_negative_and_k1_may_be():
    logps, ref_logps = torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.zeros(1000)
    assert (k3(logps, ref_logps) >= 0).all()
    assert (k1(logps, ref_logps) < 0).any()


def test_one_token_is_not_the_whole_gradient_of_k3():
    # low_var_kl of verl 0.9.1: the log ratio within ±20, the result within ±10.
    logps = torch.tensor([0.0, -1.0, -30.0, -95.0, 0.0], requires_grad=True)
    ref_logps = torch.tensor([0.0, 0.0, 0.0, 0.0, -30.0])
    found = k3(logps, ref_logps)
    assert found.tolist() == pytest.approx([0.0, math.e - 2, 10.0, 10.0, 10.0])
    (gradient,) = torch.autograd.grad(found.sum(), logps)
    assert gradient.tolist() == pytest.approx([0.0, 1 - math.e, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_policies_have_no_kl(name: str):
    assert (ESTIMATORS[name](P.log(), P.log()) == 0).all()


def test_k3_keeps_its_digits_for_policies_that_are_nearly_equal():
    # log ratio 1e-4: k3 = r²/2 to first order = 5e-9, which exp(r) − 1 − r in float32 would lose.
    value = k3(torch.tensor([0.0]), torch.tensor([1e-4]))
    assert value.item() == pytest.approx(5e-9, rel=0.05)


def test_every_loss_is_an_estimator_and_only_k1_is_no_loss():
    assert set(ESTIMATORS) - set(LOSSES) == {"k1"}
    assert all(ESTIMATORS[name] is LOSSES[name] for name in LOSSES)


def test_the_adapted_weight_matches_hand_arithmetic():
    # 10 % above the target, 100 of 1000 responses: 0.5·(1 + 0.1·0.1); 10 % below: 0.5·(1 − 0.1·0.1).
    assert adapted_weight(0.5, 6.6, 100, target=6.0, horizon=1000.0) == pytest.approx(0.505)
    assert adapted_weight(0.5, 5.4, 100, target=6.0, horizon=1000.0) == pytest.approx(0.495)


def test_a_kl_on_target_leaves_the_weight_as_it_is():
    assert adapted_weight(0.3, 6.0, 100, target=6.0, horizon=1000.0) == 0.3
    assert adapted_weight(0.3, 9.0, 0, target=6.0, horizon=1000.0) == 0.3


@pytest.mark.parametrize(
    ("kl", "expected"), [(7.2, 1.02), (7.3, 1.02), (600.0, 1.02), (0.0, 0.98), (-5.0, 0.98)]
)
def test_an_error_beyond_a_fifth_counts_as_a_fifth(kl: float, expected: float):
    assert adapted_weight(1.0, kl, 100, target=6.0, horizon=1000.0) == pytest.approx(expected)
    within = adapted_weight(1.0, 6.9, 100, target=6.0, horizon=1000.0)  # 15 % are not cut
    assert within == pytest.approx(1.015)


def test_the_weight_finds_the_one_that_holds_the_target():
    # A policy whose KL is 1/weight holds the target of 4 at a weight of 1/4.
    weight = 2.0
    for _ in range(500):
        weight = adapted_weight(weight, 1 / weight, 100, target=4.0, horizon=1000.0)
    assert weight == pytest.approx(0.25, rel=1e-3)


def test_a_kl_that_is_not_a_number_is_not_taken_for_a_small_one():
    assert math.isnan(adapted_weight(1.0, math.nan, 100, target=6.0, horizon=1000.0))
