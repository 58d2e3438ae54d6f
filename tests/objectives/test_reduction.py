import pytest
import torch

from lit_rlkv.objectives.reduction import (
    AGGREGATIONS,
    constant_length,
    masked_mean,
    masked_sum,
    sequence_mean,
    token_mean,
    weighted_sum,
)

NAN = float("nan")


@pytest.mark.parametrize("reduce", [masked_sum, masked_mean])
def test_masked_values_have_no_effect(reduce):
    values = torch.tensor([[1.0, NAN], [3.0, 5.0]], requires_grad=True)
    is_counted = torch.tensor([[True, False], [True, True]])
    found = reduce(values, is_counted)
    assert float(found.detach()) == {masked_sum: 9.0, masked_mean: 3.0}[reduce]
    found.backward()
    share = {masked_sum: 1.0, masked_mean: 1 / 3}[reduce]
    torch.testing.assert_close(values.grad, share * is_counted.float())


def test_the_mean_over_an_empty_mask_is_0_and_not_nan():
    assert float(masked_mean(torch.tensor([NAN, 1.0]), torch.zeros(2, dtype=torch.bool))) == 0


def test_a_weight_of_0_leaves_out_even_nan():
    values, weight = torch.tensor([NAN, 2.0, 4.0], requires_grad=True), torch.tensor([0.0, 0.5, 1.0])
    found = weighted_sum(values, weight)
    assert float(found.detach()) == 5.0
    found.backward()
    assert values.grad.tolist() == [0.0, 0.5, 1.0]


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
