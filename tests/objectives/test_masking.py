import pytest
import torch

from lit_rlkv.objectives.masking import masked_mean, masked_sum, weighted_sum

NAN = float("nan")


@pytest.mark.parametrize("reduce", [masked_sum, masked_mean])
def test_what_is_not_counted_never_matters(reduce):
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
