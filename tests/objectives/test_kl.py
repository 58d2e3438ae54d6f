import math

import pytest
import torch

from lit_rlkv.objectives.kl import LOSSES, k1, k2, k3

ESTIMATORS = {"k1": k1, **LOSSES}

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


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_policies_have_no_kl(name: str):
    assert (ESTIMATORS[name](P.log(), P.log()) == 0).all()


def test_k3_keeps_its_digits_for_policies_that_are_nearly_equal():
    # log ratio 1e-4: k3 = r²/2 to first order = 5e-9, which exp(r) − 1 − r in float32 would lose.
    value = k3(torch.tensor([0.0]), torch.tensor([1e-4]))
    assert value.item() == pytest.approx(5e-9, rel=0.05)
