import math

import pytest
import torch

from lit_rlkv.objectives.preference import ranking_loss


def test_the_ranking_loss_matches_hand_arithmetic():
    # Margins 0 and log 3: −log σ is log 2 and log(4/3).
    chosen, rejected = torch.tensor([1.0, math.log(3)]), torch.tensor([1.0, 0.0])
    assert ranking_loss(chosen, rejected).item() == pytest.approx((math.log(2) + math.log(4 / 3)) / 2)


def test_only_the_margin_counts():
    chosen, rejected = torch.tensor([0.3, -0.2]), torch.tensor([0.1, 0.4])
    torch.testing.assert_close(ranking_loss(chosen + 5, rejected + 5), ranking_loss(chosen, rejected))


def test_the_loss_falls_as_the_chosen_answer_rises_and_stays_finite():
    margins = torch.tensor([-200.0, -1.0, 0.0, 1.0, 200.0])
    losses = [ranking_loss(margin[None], torch.zeros(1)).item() for margin in margins]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(200.0)


def test_the_gradient_is_the_probability_of_the_wrong_order():
    # d/dr −log σ(r − r') = −σ(r' − r); at margin log 3 that is −1/4.
    chosen = torch.tensor([math.log(3)], requires_grad=True)
    ranking_loss(chosen, torch.zeros(1)).backward()
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-0.25)
