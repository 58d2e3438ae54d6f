import math

import pytest
import torch

from lit_rlkv.objectives.preference import DPO_LOSSES, best_and_worst, check_dpo, dpo_loss, ranking_loss


def test_the_ranking_loss_matches_hand_arithmetic():
    # Margins 0 and log 3: −log σ is log 2 and log(4/3).
    chosen, rejected = torch.tensor([1.0, math.log(3)]), torch.tensor([1.0, 0.0])
    assert ranking_loss(chosen, rejected).item() == pytest.approx(math.log(2) + math.log(4 / 3))


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


def test_the_sigmoid_loss_matches_hand_arithmetic():
    # β = 1/2 and h = 0 and 2·log 3: −log σ(0) = log 2, −log σ(log 3) = log(4/3).
    chosen, rejected = torch.tensor([1.0, 2 * math.log(3)]), torch.tensor([1.0, 0.0])
    loss = dpo_loss(chosen, rejected, beta=0.5)
    assert loss.tolist() == pytest.approx([math.log(2), math.log(4 / 3)])


def test_label_smoothing_weighs_the_loss_of_the_flipped_pair():
    # σ(log 3) = 3/4: 0.9·log(4/3) + 0.1·log 4.
    chosen, rejected = torch.tensor([math.log(3)]), torch.tensor([0.0])
    loss = dpo_loss(chosen, rejected, beta=1.0, label_smoothing=0.1)
    assert loss.item() == pytest.approx(0.9 * math.log(4 / 3) + 0.1 * math.log(4))
    flipped = dpo_loss(rejected, chosen, beta=1.0)
    plain = dpo_loss(chosen, rejected, beta=1.0)
    torch.testing.assert_close(loss, 0.9 * plain + 0.1 * flipped)


def test_smoothed_labels_have_a_finite_best_preference():
    # The loss is least where σ(βh) = 1 − ε; without smoothing it falls for ever.
    h = torch.tensor([math.log(9.0) / 0.5], requires_grad=True)
    for smoothing, expected in ((0.1, 0.0), (0.0, -0.05)):
        loss = dpo_loss(h, torch.zeros(1), beta=0.5, label_smoothing=smoothing)
        (gradient,) = torch.autograd.grad(loss.sum(), h)
        assert gradient.item() == pytest.approx(expected, abs=1e-6)


def test_ipo_is_the_squared_distance_to_its_target():
    # β = 1/4: the target is 2; h = 0, 2 and 5 are 2, 0 and 3 away.
    chosen, rejected = torch.tensor([1.0, 3.0, 4.0]), torch.tensor([1.0, 1.0, -1.0])
    assert dpo_loss(chosen, rejected, beta=0.25, kind="ipo").tolist() == [4.0, 0.0, 9.0]
    assert dpo_loss(chosen, rejected, beta=0.25)[2] < dpo_loss(chosen, rejected, beta=0.25)[1]


@pytest.mark.parametrize("kind", DPO_LOSSES)
def test_losses_of_pairs_stay_finite_and_depend_on_the_difference_alone(kind: str):
    margins = torch.tensor([-500.0, 0.3, 500.0])
    loss = dpo_loss(margins, torch.zeros(3), beta=0.1, kind=kind)
    assert loss.isfinite().all()
    torch.testing.assert_close(dpo_loss(margins + 7, torch.full((3,), 7.0), beta=0.1, kind=kind), loss)


@pytest.mark.parametrize("kind", DPO_LOSSES)
def test_the_first_step_raises_the_better_and_lowers_the_worse_response(kind: str):
    chosen, rejected = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    dpo_loss(chosen, rejected, beta=0.1, kind=kind).sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() < 0
    assert rejected.grad.item() == -chosen.grad.item()


def test_options_that_make_no_loss_are_refused():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="kind='hinge' is unknown; choose one of sigmoid, ipo"):
        dpo_loss(one, one, beta=0.1, kind="hinge")
    with pytest.raises(ValueError, match=r"beta must be a number above 0, got 0\.0"):
        dpo_loss(one, one, beta=0.0)
    for smoothing in (-0.1, 0.5, math.nan):
        with pytest.raises(ValueError, match=r"at least 0 and below 0\.5"):
            check_dpo(beta=0.1, kind="sigmoid", label_smoothing=smoothing)
    with pytest.raises(ValueError, match=r"label_smoothing must be 0 for kind='ipo', got 0\.1"):
        check_dpo(beta=0.1, kind="ipo", label_smoothing=0.1)
    check_dpo(beta=0.1, kind="sigmoid", label_smoothing=0.49)
    check_dpo(beta=0.1, kind="ipo", label_smoothing=0.0)


def test_the_first_best_and_the_last_worst_response_make_a_pair():
    scores = torch.tensor([[0.0, 2.0, 1.0, -1.0], [1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    best, worst, is_tie = best_and_worst(scores)
    assert best.tolist() == [1, 0, 3]
    assert worst.tolist() == [3, 3, 2]
    assert is_tie.tolist() == [False, False, False]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_group_that_agrees_is_a_tie_of_two_different_responses(n: int):
    best, worst, is_tie = best_and_worst(torch.full((3, n), 0.5))
    assert is_tie.all()
    assert best.tolist() == [0] * 3
    assert worst.tolist() == [n - 1] * 3


def test_a_group_of_one_makes_no_pair():
    with pytest.raises(ValueError, match="a group must have at least 2 responses, got 1; sample more"):
        best_and_worst(torch.zeros(3, 1))
