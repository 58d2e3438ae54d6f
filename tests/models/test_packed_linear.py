"""Packed weights: the same products, in a block that leaves no trace."""

from functools import partial

import pytest
import torch
from torch import nn

from lit_rlkv.models.packed_linear import LEAST_ELEMENTS, packed_weights


class Model(nn.Module):
    """A large matrix with a bias, one without, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 512)
        self.second = nn.Linear(512, 256, bias=False)
        self.small = nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.second(self.first(x).relu()))


def is_packed(linear: nn.Linear) -> bool:
    return "forward" in vars(linear)


def make(dtype=torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


@pytest.mark.parametrize("shape", [(3, 256), (3, 5, 256), (64, 1, 256)])
def test_outputs_differ_by_rounding_only(shape):
    model, x = make(), torch.randn(shape)
    with torch.no_grad():
        expected = model(x)
        with packed_weights(model, n_rows=3):
            assert is_packed(model.first)
            assert is_packed(model.second)
            found = model(x)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_block_leaves_no_trace_even_if_it_fails():
    model = make()
    with pytest.raises(RuntimeError, match="inside"), packed_weights(model, n_rows=1):
        raise RuntimeError("inside")
    assert not any(is_packed(m) for m in (model.first, model.second, model.small))
    model(torch.randn(2, 256)).sum().backward()
    assert model.first.weight.grad is not None


def test_only_large_float32_matrices_outside_of_autocast_are_packed():
    model = make()
    assert model.small.weight.numel() < LEAST_ELEMENTS <= model.second.weight.numel()
    with packed_weights(model, n_rows=1):
        assert not is_packed(model.small)
    for dtype in (torch.bfloat16, torch.float64):
        other = make(dtype)
        with packed_weights(other, n_rows=1):
            assert not is_packed(other.first)
    with torch.autocast("cpu", torch.bfloat16), packed_weights(model, n_rows=1):
        assert not is_packed(model.first)


def test_a_failure_while_packing_leaves_no_trace(monkeypatch):
    model, packed = make(), []

    def fails_at_the_second(*args):
        packed.append(args)
        if len(packed) == 2:
            raise MemoryError("no room for the copy")
        return partial(*args)

    monkeypatch.setattr("lit_rlkv.models.packed_linear.partial", fails_at_the_second)
    with pytest.raises(MemoryError), packed_weights(model, n_rows=1):
        pass
    assert not any(is_packed(m) for m in (model.first, model.second, model.small))
