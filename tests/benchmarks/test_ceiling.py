"""The bound that bandwidth sets, against figures by hand."""

import pytest
from ceiling import MODELS, tokens_per_second

from lit_rlkv.planning.seconds import mean_keys


def test_mean_keys_are_those_of_every_step():
    steps = [min(10 + step, 30 + 4 / 2) for step in range(100)]
    assert mean_keys(10, 100, 30 + 4 / 2) == pytest.approx(sum(steps) / 100, rel=0.01)
    assert mean_keys(40, 100, 30 + 4 / 2) == 32
    assert mean_keys(10, 100, None) == 60


@pytest.mark.parametrize(
    ("is_fp8", "budget", "expected"), [(False, None, 24_500), (True, None, 44_400), (False, 1024, 79_700)]
)
def test_an_h100_with_the_shape_of_1_5b(is_fp8, budget, expected):
    n_keys = mean_keys(256, 8192, None if budget is None else budget + 128 / 2)
    found = tokens_per_second(MODELS["1.5b"], 3.35e12, 256, n_keys, is_fp8=is_fp8)
    assert found == pytest.approx(expected, rel=2e-3)
