import pytest
import torch

from lit_rlkv.rollout.sampling import sample

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])
N_DRAWS = 20_000
CRITICAL = 24.3
"""0.1 % point of chi-square with 7 degrees of freedom."""


def chi_square(drawn_at: float, tested_at: float) -> float:
    """Statistic of draws at one temperature against the probabilities of another."""
    tokens, _, _ = sample(LOGITS.expand(N_DRAWS, -1), drawn_at, torch.Generator().manual_seed(0))
    counts = torch.bincount(tokens, minlength=len(LOGITS))
    expected = N_DRAWS * (LOGITS / tested_at).softmax(-1)
    return float(((counts - expected).square() / expected).sum())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_tokens_are_drawn_from_the_softmax(temperature: float):
    assert chi_square(temperature, temperature) < CRITICAL


def test_the_test_tells_a_slightly_wrong_temperature():
    assert chi_square(1.05, 1.0) > CRITICAL


def test_log_probs_are_those_of_the_tokens_at_that_temperature():
    # Logits 0 and log 9 at temperature 2 are probabilities 1/4 and 3/4.
    logits = torch.tensor([[0.0, 9.0]]).log().clamp(min=0).expand(50, -1)
    tokens, logps, _ = sample(logits, 2.0, torch.Generator().manual_seed(0))
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logps, torch.tensor([0.25, 0.75]).log()[tokens])


def test_temperature_zero_takes_the_likeliest_token_for_certain():
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    tokens, logps, _ = sample(logits, 0.0, None)
    assert tokens.tolist() == [0, 7]
    assert logps.tolist() == [0.0, 0.0]


def test_the_same_generator_state_draws_the_same_tokens():
    draws = [sample(LOGITS.expand(100, -1), 1.0, torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_low_precision_logits_give_float32_log_probs():
    _, logps, _ = sample(LOGITS.bfloat16()[None], 1.0, torch.Generator().manual_seed(0))
    assert logps.dtype == torch.float32


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([0.0, -torch.inf, 0.0]).expand(5000, -1)
    tokens, logps, _ = sample(logits, 1.0, torch.Generator().manual_seed(0))
    assert set(tokens.tolist()) == {0, 2}
    assert logps.isfinite().all()
