"""Scalar heads are exact at every precision of the run."""

import pytest
import torch

from lit_rlkv.models.heads import ScalarHead, last_token


def make_head(dtype: torch.dtype) -> ScalarHead:
    head = ScalarHead(4)
    head.linear.weight.data.copy_(torch.tensor([[1.0, 2.0, 4.0, 4.0]]))
    return head.to(dtype)


@pytest.mark.parametrize("autocasts", [False, True])
def test_rewards_that_bfloat16_would_make_equal_stay_apart(autocasts: bool):
    # 11 = 1 + 2 + 4 + 4, and 11 + 2⁻⁷·4: between 8 and 16 bfloat16 has steps of 2⁻⁴
    hidden = torch.ones(2, 4, dtype=torch.bfloat16)
    hidden[1, 3] += 2**-7
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        found = make_head(torch.bfloat16)(hidden)
    assert found.dtype == torch.float32
    assert found.tolist() == [11.0, 11.03125]
    assert found.bfloat16()[0] == found.bfloat16()[1]  # what a head in that precision would say


def test_a_head_in_double_precision_stays_there():
    assert make_head(torch.float64)(torch.ones(3, 4, dtype=torch.float64)).dtype == torch.float64


def test_a_sequence_is_read_at_its_last_token():
    hidden = torch.arange(6.0).view(2, 3, 1)
    attention_mask = torch.tensor([[False, True, True], [True, True, False]])
    assert last_token(hidden, attention_mask).tolist() == [[2.0], [4.0]]
