import math

import pytest
import torch

from lit_rlkv.objectives.clipped import clipped_value
from lit_rlkv.objectives.reduction import weighted_sum

# The old value is 1 everywhere, so with a clip of 0.5 the bounds are 0.5 and 1.5.
OLD = torch.ones(1, 4)
VALUES = torch.tensor([[1.25, 3.0, 3.0, 0.0]])
RETURNS = torch.tensor([[2.25, 1.0, 4.0, 1.0]])


def test_without_a_clip_the_loss_is_half_the_squared_error():
    found = clipped_value(VALUES, OLD, RETURNS, None)
    # errors −1, 2, −1, −1
    assert found.loss.tolist() == [[0.5, 2.0, 0.5, 0.5]]
    assert not found.is_clipped.any()


def test_clipped_losses_match_hand_arithmetic():
    found = clipped_value(VALUES, OLD, RETURNS, 0.5)
    # within the bounds: (1.25 − 2.25)²/2
    # moved away from its return, up: the worse of (3 − 1)² and (1.5 − 1)², down: of (0 − 1)² and (0.5 − 1)²
    # moved towards its return: the worse of (3 − 4)² and (1.5 − 4)²
    assert found.loss.tolist() == [[0.5, 2.0, 3.125, 0.5]]
    assert found.is_clipped.tolist() == [[False, False, True, False]]


def test_a_value_that_went_far_enough_towards_its_return_has_no_gradient():
    values = VALUES.clone().requires_grad_()
    found = clipped_value(values, OLD, RETURNS, 0.5)
    (gradient,) = torch.autograd.grad(found.loss.sum(), values)
    # V − R where the clip is not active; its twin without a clip has a gradient there too
    assert gradient.tolist() == [[-1.0, 2.0, 0.0, -1.0]]
    (unclipped,) = torch.autograd.grad(clipped_value(values, OLD, RETURNS, None).loss.sum(), values)
    assert unclipped.tolist() == [[-1.0, 2.0, -1.0, -1.0]]


def test_the_clip_never_lowers_the_loss():
    draw = torch.Generator().manual_seed(0)
    values, old, target = (torch.randn(50, 20, generator=draw) for _ in range(3))
    clipped = clipped_value(values, old, target, 0.2)
    free = clipped_value(values, old, target, None)
    assert (clipped.loss >= free.loss).all()
    assert torch.equal(clipped.is_clipped, clipped.loss > free.loss)
    assert 0.1 < clipped.is_clipped.float().mean() < 0.9


def test_inside_the_bounds_rounding_makes_no_clip():
    draw = torch.Generator().manual_seed(0)
    values, old, target = (torch.randn(50, 20, generator=draw) for _ in range(3))
    assert (old + (values - old) != values).any()  # what a clamp of the difference would compare
    assert not clipped_value(values, old, target, 100.0).is_clipped.any()


def test_values_outside_the_response_mask_do_not_matter_even_nan():
    weight = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    results = []
    for junk in (0.0, math.nan):
        values = torch.tensor([[junk, 1.0, 2.0, junk]], requires_grad=True)
        old, target = torch.tensor([[junk, 1.1, 0.5, junk]]), torch.tensor([[junk, 3.0, -1.0, junk]])
        total = weighted_sum(clipped_value(values, old, target, 0.2).loss, weight)
        (gradient,) = torch.autograd.grad(total, values)
        results.append((total.detach(), gradient[:, 1:3]))
    torch.testing.assert_close(results[0], results[1])
    # (1 − 3)²/2 and (2 − (−1))²/2, half of each
    assert results[0][0].item() == pytest.approx(1.0 + 2.25)
