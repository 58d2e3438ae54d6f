import torch

from lit_rlkv.diagnostics import as_floats


def test_numbers_come_to_the_host_in_their_order():
    assert as_floats({"b": torch.tensor(2), "a": torch.tensor(0.5, dtype=torch.float64)}) == {
        "b": 2.0,
        "a": 0.5,
    }
    assert as_floats({}) == {}
