import math

import pytest
import torch

from lit_rlkv.diagnostics import sketch
from lit_rlkv.diagnostics.sketch import CountSketch

VALUES = torch.randn(1000, generator=torch.Generator().manual_seed(0)) + 0.5
SQUARE = float(VALUES.square().sum())


def squares(size: int, n: int = 400) -> torch.Tensor:
    """‖sketch‖² over seeds."""
    return torch.stack([CountSketch(size, seed)("weight", VALUES).square().sum() for seed in range(n)])


@pytest.mark.parametrize("size", [16, 128])
def test_the_square_is_unbiased_and_as_exact_as_promised(size: int):
    found = squares(size)
    promised = SQUARE * math.sqrt(2 / size)
    assert found.mean().item() == pytest.approx(SQUARE, abs=4 * promised / math.sqrt(len(found)))
    # a standard deviation of 400 draws is itself known to some 5 %
    assert 0.75 * promised < found.std().item() < 1.2 * promised


def test_the_comparison_catches_buckets_without_signs():
    unsigned = torch.zeros(16).index_add(0, torch.randint(16, (1000,)), VALUES).square().sum()
    assert unsigned.item() > 5 * SQUARE


def test_a_sketch_is_linear_and_keeps_products_of_the_same_name():
    other = torch.randn(1000, generator=torch.Generator().manual_seed(1)) + 0.5
    one = CountSketch(64)
    torch.testing.assert_close(
        one("weight", VALUES + 2 * other), one("weight", VALUES) + 2 * one("weight", other)
    )
    products = [
        (CountSketch(64, seed)("weight", VALUES) @ CountSketch(64, seed)("weight", other)).item()
        for seed in range(400)
    ]
    expected = float(VALUES @ other)
    error = 4 * math.sqrt(2 / 64) * math.sqrt(SQUARE * float(other.square().sum())) / math.sqrt(400)
    assert sum(products) / 400 == pytest.approx(expected, abs=error)
    assert expected > 2 * error  # so that a mean of 0, which vectors of two names have, is told apart
    apart = [
        (CountSketch(64, seed)("a", VALUES) @ CountSketch(64, seed)("b", other)).item() for seed in range(400)
    ]
    assert sum(apart) / 400 == pytest.approx(0.0, abs=error)


def test_long_vectors_are_sketched_in_chunks(monkeypatch):
    monkeypatch.setattr(sketch, "CHUNK", 300)
    found = squares(64)
    error = 4 * SQUARE * math.sqrt(2 / 64) / math.sqrt(len(found))
    assert found.mean().item() == pytest.approx(SQUARE, abs=error)


def test_nothing_is_drawn_from_the_global_generator():
    before = torch.get_rng_state()
    CountSketch(8)("weight", VALUES)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [0, True])
def test_a_sketch_of_no_number_of_buckets_is_refused(size):
    with pytest.raises(ValueError, match=f"a sketch of size={size} holds nothing; give a whole number"):
        CountSketch(size)
