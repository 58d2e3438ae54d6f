import math

import pytest
import torch

from lit_rlkv.diagnostics import covariance as module
from lit_rlkv.diagnostics.covariance import proxy_sums, squared_probs, variance_proxy
from lit_rlkv.kernels.token_logps import TokenSets

PREFIX = "variance_proxy/"


def proxies(weights: list[list[float]], square: float | None = 0.5) -> dict[str, float]:
    """Two responses, A = 1 and −2, π = 1/2 and Σπ² = 1/2 at every action; the last column is no action."""
    is_counted = torch.tensor([[True, True, False], [True, False, False]])
    sums = proxy_sums(
        torch.full((2, 3), math.log(0.5)).masked_fill(~is_counted, math.nan),
        torch.full((2, 3), 0.5).masked_fill(~is_counted, math.nan),
        torch.tensor([[1.0, 1.0, 9.0], [-2.0, 9.0, 9.0]]),
        torch.tensor(weights),
        is_counted,
    )
    return {name.removeprefix(PREFIX): value for name, value in variance_proxy(sums, square).items()}


def test_proxies_match_hand_arithmetic():
    # each action: 1 − 2·0.5 + 0.5 = 0.5, so that W = 1 and 0.5
    assert proxies([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]) == pytest.approx(
        {
            "expected_w": 0.75,
            "expected_a_squared": 2.5,  # (1 + 4) / 2
            "proxy2_total_power": 1.5,  # (1·1 + 4·0.5) / 2
            "proxy1_signal_strength": 0.5,
            "proxy3_pure_noise": 1.0,  # (1.5 − 0.5) / (2 − 1)
        }
    )


def test_weights_enter_as_in_verl():
    # first response: weights 2 and 0, mean 1; its W_on leaves out the action of weight 0
    found = proxies([[2.0, 0.0, 9.0], [0.5, 9.0, 9.0]])
    assert found["expected_w"] == pytest.approx((4 * 0.5 + 0.25 * 0.5) / 2)
    assert found["proxy2_total_power"] == pytest.approx((1 * 1 * 0.5 + 0.25 * 4 * 0.5) / 2)


def test_noise_is_never_negative_and_unknown_without_the_gradient():
    ones = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert proxies(ones, square=7.0)["proxy3_pure_noise"] == 0.0
    assert set(proxies(ones, square=None)) == {"expected_w", "expected_a_squared", "proxy2_total_power"}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_squared_probs_are_those_of_the_distribution_sampled(temperature: float, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 4, generator=generator), torch.randn(11, 4, generator=generator)
    expected = (hidden @ weight.T / temperature).softmax(-1).square().sum(-1)
    sizes = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ weight.T

    monkeypatch.setattr(module, "MAX_CHUNK_LOGITS", 44)
    found = squared_probs(hidden, head, temperature, 11)
    torch.testing.assert_close(found, expected)
    assert sizes == [4, 4, 1]  # never more than 44 logits at once
    sets = TokenSets(torch.tensor([2] * 9), torch.tensor([3, 5] * 9))
    kept = (hidden @ weight.T / temperature)[:, [3, 5]].softmax(-1).square().sum(-1)
    torch.testing.assert_close(squared_probs(hidden, head, temperature, 11, sets), kept)
    assert not torch.allclose(squared_probs(hidden, head, 2 * temperature, 11), expected, rtol=1e-2)
