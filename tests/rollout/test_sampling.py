import re

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lit_rlkv.rollout.sampling import sample
from lit_rlkv.settings import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])
N_DRAWS = 20_000
CRITICAL = 24.3
"""0.1 % point of chi-square with 7 degrees of freedom."""
PLAIN, GREEDY = Sampling(), Sampling(temperature=0)


def chi_square(drawn_at: float, tested_at: float) -> float:
    """Statistic of draws at one temperature against the probabilities of another."""
    tokens, _, _ = sample(LOGITS.expand(N_DRAWS, -1), Sampling(drawn_at), torch.Generator().manual_seed(0))
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
    tokens, logps, _ = sample(logits, Sampling(2.0), torch.Generator().manual_seed(0))
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logps, torch.tensor([0.25, 0.75]).log()[tokens])


def test_temperature_zero_takes_the_likeliest_token_for_certain():
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    tokens, logps, _ = sample(logits, GREEDY, None)
    assert tokens.tolist() == [0, 7]
    assert logps.tolist() == [0.0, 0.0]


def test_the_same_generator_state_draws_the_same_tokens():
    draws = [sample(LOGITS.expand(100, -1), PLAIN, torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_low_precision_logits_give_float32_log_probs():
    _, logps, _ = sample(LOGITS.bfloat16()[None], PLAIN, torch.Generator().manual_seed(0))
    assert logps.dtype == torch.float32


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([0.0, -torch.inf, 0.0]).expand(5000, -1)
    tokens, logps, _ = sample(logits, PLAIN, torch.Generator().manual_seed(0))
    assert set(tokens.tolist()) == {0, 2}
    assert logps.isfinite().all()


VOCAB = 101
TRUNCATIONS = [
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.05},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02},
]


def name_of(options: dict[str, float]) -> str:
    return "-".join(options)


def random_logits(n_rows: int = 64, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(n_rows, VOCAB, generator=torch.Generator().manual_seed(5))


def kept_by(logits: Tensor, temperature: float, options: dict[str, float]) -> Tensor:
    """The mask over the vocabulary that `sample` returns, in either of its forms."""
    _, _, kept = sample(logits, Sampling(temperature, **options), torch.Generator().manual_seed(0))
    if kept.dtype == torch.bool:
        return kept
    assert kept.shape == (len(logits), min(options["top_k"], logits.shape[1]))
    places = kept.long().masked_fill(kept < 0, VOCAB)
    return torch.zeros(len(logits), VOCAB + 1).scatter(1, places, 1.0).bool()[:, :VOCAB]


def kept_by_transformers(logits: Tensor, temperature: float, options: dict[str, float]) -> Tensor:
    kinds = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    for name, kind in kinds.items():
        if name in options:
            scores = kind(options[name])(None, scores)
    return scores > -torch.inf


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("options", TRUNCATIONS, ids=name_of)
def test_the_kept_tokens_are_those_of_transformers(options, temperature):
    kept = kept_by(random_logits(), temperature, options)
    assert torch.equal(kept, kept_by_transformers(random_logits(), temperature, options))
    assert kept.any(1).all()
    assert not kept.all()


def test_another_order_of_the_steps_is_noticed():
    options = {"top_k": 30, "top_p": 0.9, "min_p": 0.05}
    scores = MinPLogitsWarper(0.05)(None, random_logits())
    scores = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(30)(None, scores))
    assert not torch.equal(kept_by(random_logits(), 1.0, options), scores > -torch.inf)


@pytest.mark.parametrize("options", TRUNCATIONS, ids=name_of)
def test_log_probs_are_of_the_renormalised_distribution_and_no_dropped_token_is_drawn(options):
    logits = random_logits(2000)
    tokens, logps, _ = sample(logits, Sampling(0.8, **options), torch.Generator().manual_seed(0))
    kept = kept_by(logits, 0.8, options)
    expected = (logits / 0.8).masked_fill(~kept, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(logps, expected.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    assert kept.gather(1, tokens[:, None]).all()


def test_tokens_are_drawn_from_the_renormalised_softmax():
    tokens, _, _ = sample(LOGITS.expand(N_DRAWS, -1), Sampling(top_k=4), torch.Generator().manual_seed(0))
    counts = torch.bincount(tokens, minlength=len(LOGITS))[:4]
    expected = N_DRAWS * LOGITS[:4].softmax(-1)
    assert int(counts.sum()) == N_DRAWS
    assert float(((counts - expected).square() / expected).sum()) < 16.3  # 0.1 % point, 3 degrees of freedom


@pytest.mark.parametrize("top_k", [1, 3, 200])
def test_top_k_keeps_exactly_so_many_of_equal_tokens(top_k):
    kept = kept_by(torch.zeros(5, VOCAB), 1.0, {"top_k": top_k})
    assert (kept.sum(1) == min(top_k, VOCAB)).all()


@pytest.mark.parametrize("options", [{"top_p": 1e-9}, {"min_p": 0.999}, {"top_k": 1}], ids=name_of)
def test_the_likeliest_token_is_always_kept(options):
    logits = random_logits()
    tokens, logps, _ = sample(logits, Sampling(**options), torch.Generator().manual_seed(0))
    assert torch.equal(tokens, logits.argmax(-1))
    assert (logps == 0).all()


@pytest.mark.parametrize("options", [{}, {"top_p": 1.0, "min_p": 0.0}], ids=str)
def test_a_truncation_that_is_off_changes_nothing(options):
    tokens, logps, kept = sample(random_logits(), Sampling(**options), torch.Generator().manual_seed(0))
    plain = sample(random_logits(), PLAIN, torch.Generator().manual_seed(0))
    assert torch.equal(tokens, plain[0])
    assert torch.equal(logps, plain[1])
    assert kept is None


def test_greedy_decoding_records_nothing():
    tokens, logps, kept = sample(random_logits(), Sampling(0.0, top_k=3), None)
    assert torch.equal(tokens, random_logits().argmax(-1))
    assert (logps == 0).all()
    assert kept is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_k": 0}, "top_k must be a whole number of at least 1 or null, got 0 ("),
        ({"top_k": 2.5}, "top_k must be a whole number of at least 1 or null, got 2.5"),
        ({"top_k": "5"}, "top_k must be a whole number of at least 1 or null, got '5' ("),
        ({"top_k": True}, "top_k must be a whole number of at least 1 or null, got True ("),
        ({"top_p": 0.0}, "top_p must be a number above 0 and at most 1, got 0.0 ("),
        ({"top_p": 1.5}, "top_p must be a number above 0 and at most 1, got 1.5"),
        ({"min_p": 1.0}, "min_p must be a number of at least 0 and below 1 or null, got 1.0 ("),
        ({"min_p": -0.1}, "min_p must be a number of at least 0 and below 1 or null, got -0.1"),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        Sampling(**options)
