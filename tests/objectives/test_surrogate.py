import math

import pytest
import torch
from torch import Tensor

from lit_rlkv.objectives.clipped import Surrogate, clipped_surrogate
from lit_rlkv.objectives.reduction import weighted_sum

RATIOS = torch.tensor([[0.5, 0.9, 1.1, 1.5]])


def surrogate(advantage: float, ratios: Tensor = RATIOS) -> Surrogate:
    return clipped_surrogate(ratios.log(), torch.full_like(ratios, advantage), 0.2, 0.3)


def test_gains_match_hand_arithmetic_for_a_good_action():
    # min(ratio, clip(ratio, 0.8, 1.3)) · 2: only the high ratio is cut.
    torch.testing.assert_close(surrogate(2.0).gain, torch.tensor([[1.0, 1.8, 2.2, 2.6]]))


def test_gains_match_hand_arithmetic_for_a_bad_action():
    # min(−2·ratio, −2·clip(ratio, 0.8, 1.3)): only the low ratio is cut.
    torch.testing.assert_close(surrogate(-2.0).gain, torch.tensor([[-1.6, -1.8, -2.2, -3.0]]))


def test_the_clip_is_active_only_where_it_stops_the_gradient():
    good, bad = surrogate(2.0), surrogate(-2.0)
    assert good.is_clipped_high.tolist() == [[False, False, False, True]]
    assert bad.is_clipped_low.tolist() == [[True, False, False, False]]
    assert not good.is_clipped_low.any()
    assert not bad.is_clipped_high.any()
    for advantage, one in ((2.0, good), (-2.0, bad)):
        logps = RATIOS.log().requires_grad_()
        gain = clipped_surrogate(logps, torch.full((1, 4), advantage), 0.2, 0.3).gain
        (gradient,) = torch.autograd.grad(gain.sum(), logps)
        assert torch.equal(gradient == 0, one.is_clipped_low | one.is_clipped_high)


def test_an_action_of_no_advantage_is_never_clipped():
    one = surrogate(0.0)
    assert not (one.is_clipped_low | one.is_clipped_high).any()
    assert (one.gain == 0).all()


def test_at_ratio_one_the_gradient_is_that_of_the_plain_policy_gradient():
    logps = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    advantages = torch.tensor([[3.0, -0.5]])
    gain = clipped_surrogate(logps - logps.detach(), advantages, 0.2, 0.2).gain
    (gradient,) = torch.autograd.grad(gain.sum(), logps)
    assert torch.equal(gradient, advantages)


def test_values_outside_the_response_mask_do_not_matter_even_nan():
    weight = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    advantages = torch.tensor([[0.0, 1.0, -1.0, 0.0]])
    results = []
    for junk in (0.0, math.nan):
        logps = torch.tensor([[junk, -1.0, -2.0, junk]], requires_grad=True)
        old = torch.tensor([[junk, -1.1, -1.9, junk]])
        total = weighted_sum(clipped_surrogate(logps - old, advantages, 0.2, 0.2).gain, weight)
        (gradient,) = torch.autograd.grad(total, logps)
        results.append((total.detach(), gradient[:, 1:3]))
    torch.testing.assert_close(results[0], results[1])
    assert results[0][0].item() == pytest.approx(0.5 * math.exp(0.1) - 0.5 * math.exp(-0.1))
