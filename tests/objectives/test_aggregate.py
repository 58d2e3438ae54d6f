import pytest
import torch

from lit_rlkv.objectives.aggregate import AGGREGATIONS, constant_length, sequence_mean, token_mean

# Responses of three, one and no counted actions.
IS_COUNTED = torch.tensor([[True, True, True, False], [False, True, False, False], [False] * 4])


def test_token_mean_weighs_every_action_the_same():
    assert token_mean(IS_COUNTED, 10)[IS_COUNTED].tolist() == [0.25] * 4


def test_sequence_mean_shares_the_weight_of_a_response_among_its_actions():
    # Two responses count; 1/2 of each, in thirds and whole.
    expected = pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert sequence_mean(IS_COUNTED, 10)[IS_COUNTED].tolist() == expected


def test_constant_length_divides_by_the_longest_response_allowed():
    assert constant_length(IS_COUNTED, 10)[IS_COUNTED].tolist() == pytest.approx([0.1 / 2] * 4)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_nothing_else_weighs_anything(name: str):
    weight = AGGREGATIONS[name](IS_COUNTED, 10)
    assert (weight[~IS_COUNTED] == 0).all()
    assert (AGGREGATIONS[name](torch.zeros(2, 3, dtype=torch.bool), 10) == 0).all()


@pytest.mark.parametrize("name", ["token", "sequence"])
def test_means_weigh_one_in_all(name: str):
    assert AGGREGATIONS[name](IS_COUNTED, 10).sum().item() == pytest.approx(1.0)
