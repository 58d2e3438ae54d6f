"""Losses as TRL 1.16 (GRPOTrainer._compute_loss) and verl 0.9 (core_algos.py) define them, in float64.

Lengths and the number of responses are powers of two, so that the weights of the aggregations are exact.
Columns outside the responses hold NaN, which no loss may notice.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lit_rlkv.objectives.clipped import clipped_surrogate, clipped_weight, sequence_log_ratio
from lit_rlkv.objectives.corrections import ISWeights, masked, sequence_masked, sequence_truncated, truncated
from lit_rlkv.objectives.entropy import has_high_entropy, token_entropy
from lit_rlkv.objectives.kl import bias_corrected, k3
from lit_rlkv.objectives.reduction import AGGREGATIONS, weighted_sum

LENGTHS = [1, 2, 4, 8, 8, 4, 4, 1]
MAX_NEW_TOKENS = 8
PLACE = torch.arange(2 + MAX_NEW_TOKENS).expand(len(LENGTHS), -1) - 2
IS_ACTION = PLACE.ge(0) & PLACE.lt(torch.tensor(LENGTHS)[:, None])
EXACT = {"rel": 1e-12, "abs": 1e-13}


def draw(scale: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(IS_ACTION.shape, generator=generator, dtype=torch.float64)


# Ratios on both sides of every clip.
OLD_LOGPS = (-1.0 + draw(0.3, 0)).masked_fill(~IS_ACTION, math.nan)
START = OLD_LOGPS + draw(0.5, 1)
REF_LOGPS = OLD_LOGPS + draw(0.2, 2)
SCORES = torch.tensor([1.5, -0.5, 0.7, -1.2, -0.9, 0.3, 2.0, -1.0], dtype=torch.float64)
ADVANTAGES = torch.where(IS_ACTION, SCORES[:, None], 0.0)
TOKEN_WEIGHTS = draw(1.0, 3).exp()

Found = tuple[float, list[float]]
"""A loss, and its gradient at the response tokens."""
Gain = Callable[..., Tensor]
"""From log π and the chosen rows to what each of their tokens gains."""
RowLoss = Callable[[Tensor, Tensor, float, int], Tensor]
"""From log π, log π_old, A and the number of a row to the losses of its tokens."""


def loss_and_gradient(loss: Callable[[Tensor], Tensor]) -> Found:
    logps = START.clone().requires_grad_()
    value = loss(logps)
    (gradient,) = torch.autograd.grad(value, logps)
    return value.item(), gradient[IS_ACTION].tolist()


def ours(gain: Gain, aggregation: str, n_rows: int = len(LENGTHS)) -> Found:
    """The sum over micro-batches of `n_rows`, whose weights were settled for the whole step."""
    share = AGGREGATIONS[aggregation](IS_ACTION, MAX_NEW_TOKENS).double()

    def loss(logps: Tensor) -> Tensor:
        parts = [slice(start, start + n_rows) for start in range(0, len(LENGTHS), n_rows)]
        return torch.stack([-weighted_sum(gain(logps[rows], rows), share[rows]) for rows in parts]).sum()

    return loss_and_gradient(loss)


AGGREGATED: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sequence": lambda rows: torch.stack([row.mean() for row in rows]).mean(),  # loss_type=grpo
    "token": lambda rows: torch.cat(rows).mean(),  # dapo
    "constant": lambda rows: torch.cat(rows).sum() / (len(rows) * MAX_NEW_TOKENS),  # dr_grpo
}


def theirs(row_loss: RowLoss, aggregation: str) -> Found:
    def loss(logps: Tensor) -> Tensor:
        rows = []
        for row, length in enumerate(LENGTHS):
            here = slice(2, 2 + length)
            tokens = row_loss(logps[row, here], OLD_LOGPS[row, here], SCORES[row].item(), row)
            rows.append(tokens.expand(length))
        return AGGREGATED[aggregation](rows)

    return loss_and_gradient(loss)


def assert_equal(found: Found, expected: Found) -> None:
    assert found[0] == pytest.approx(expected[0], **EXACT)
    assert found[1] == pytest.approx(expected[1], **EXACT)


def differs(found: Found, other: Found) -> bool:
    gap = max(abs(a - b) for a, b in zip(found[1], other[1], strict=True))
    return abs(found[0] - other[0]) > 1e-3 and gap > 1e-3


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def surrogate(low: float, high: float, delta: float | None = None) -> Gain:
    return lambda logps, rows: (
        clipped_surrogate(logps - OLD_LOGPS[rows], ADVANTAGES[rows], low, high, delta).gain
    )


# GRPO, with the weight β of the KL to the reference


def with_kl(high: float, beta: float) -> Gain:
    plain = surrogate(0.2, high)
    return lambda logps, rows: plain(logps, rows) - beta * k3(logps, REF_LOGPS[rows])


def trl_grpo(high: float, beta: float) -> RowLoss:
    """−min(ρA, clip(ρ, 1 − ε, 1 + ε_high)·A) + β·(ref/π − log(ref/π) − 1), ρ = π/π_old."""

    def row_loss(logps, old_logps, advantage, row):
        log_ratio = REF_LOGPS[row, 2 : 2 + len(logps)] - logps
        kl = log_ratio.exp() - log_ratio - 1
        return clipped((logps - old_logps).exp(), advantage, 0.2, high) + beta * kl

    return row_loss


# GSPO


def gspo(logps, rows):
    log_ratio = sequence_log_ratio(logps - OLD_LOGPS[rows], IS_ACTION[rows])
    return clipped_surrogate(log_ratio, ADVANTAGES[rows], 0.1, 0.15).gain


def trl_gspo(logps, old_logps, advantage, row):
    """importance_sampling_level="sequence": one ratio exp(mean of log-ratios), with its gradient."""
    return clipped((logps - old_logps).mean().exp(), advantage, 0.1, 0.15)


def verl_gspo(logps, old_logps, advantage, row):
    """loss_mode=gspo: log s_t = sg[mean of log-ratios] + log π_t − sg[log π_t], times rollout_is_weights."""
    log_ratio = logps - logps.detach() + (logps - old_logps).mean().detach()
    return clipped(log_ratio.exp(), advantage, 0.1, 0.15) * TOKEN_WEIGHTS[row, 2 : 2 + len(logps)]


# CISPO


def cispo(low: float, high: float) -> Gain:
    return lambda logps, rows: (
        clipped_weight(logps - OLD_LOGPS[rows], logps, ADVANTAGES[rows], low, high).gain
    )


def trl_cispo(logps, old_logps, advantage, row):
    """−sg[min(ratio, epsilon_high)]·A·log π with epsilon_high = 1 + high."""
    return -(logps - old_logps).exp().clamp(max=1.3).detach() * advantage * logps


def verl_cispo(logps, old_logps, advantage, row):
    """Clamped from below, too."""
    return -(logps - old_logps).exp().clamp(0.8, 1.3).detach() * advantage * logps


# delta, clip_ratio_c

DELTA = 1.4


def trl_delta(logps, old_logps, advantage, row):
    """−min(min(ratio, delta)·A, clip(ratio)·A)."""
    ratio = (logps - old_logps).exp()
    return -torch.minimum(ratio.clamp(max=DELTA) * advantage, ratio.clamp(0.8, 1.2) * advantage)


def verl_dual_clip(logps, old_logps, advantage, row):
    """Where A < 0, the clipped loss, but at most −A·clip_ratio_c."""
    loss = clipped((logps - old_logps).exp(), advantage, 0.2, 0.2)
    return loss.clamp(max=-advantage * DELTA) if advantage < 0 else loss


# bias-corrected KL


def corrected_kl(logps, rows):
    return -bias_corrected(k3(logps, REF_LOGPS[rows]), logps, OLD_LOGPS[rows])


def plain_kl(logps, rows):
    return -k3(logps, REF_LOGPS[rows])


def trl_corrected_kl(logps, old_logps, advantage, row):
    """use_bias_correction_kl: (ref/π − log(ref/π) − 1)·π/π_old, with the gradient of the ratio."""
    log_ratio = REF_LOGPS[row, 2 : 2 + len(logps)] - logps
    return (log_ratio.exp() - log_ratio - 1) * (logps - old_logps).exp()


LOSSES: dict[str, tuple[Gain, RowLoss, Gain]] = {
    # Ours, theirs, and one that the comparison must tell from them.
    "grpo": (surrogate(0.2, 0.2), trl_grpo(0.2, 0.0), surrogate(0.2, 0.5)),
    "clip higher": (surrogate(0.2, 0.28), trl_grpo(0.28, 0.0), surrogate(0.28, 0.28)),
    "grpo with kl": (with_kl(0.28, 0.4), trl_grpo(0.28, 0.4), surrogate(0.2, 0.28)),
    "gspo": (gspo, trl_gspo, surrogate(0.1, 0.15)),
    "gspo with weights of tokens": (lambda x, rows: TOKEN_WEIGHTS[rows] * gspo(x, rows), verl_gspo, gspo),
    "cispo": (cispo(1.0, 0.3), trl_cispo, surrogate(1.0, 0.3)),
    "cispo with a lower bound": (cispo(0.2, 0.3), verl_cispo, cispo(1.0, 0.3)),
    "delta": (surrogate(0.2, 0.2, DELTA), trl_delta, surrogate(0.2, 0.2)),
    "dual clip": (surrogate(0.2, 0.2, DELTA), verl_dual_clip, surrogate(0.2, 0.2)),
    "bias-corrected kl": (corrected_kl, trl_corrected_kl, plain_kl),
}


@pytest.mark.parametrize("aggregation", AGGREGATED)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_equal_the_published_ones(name: str, aggregation: str):
    gain, published, other = LOSSES[name]
    expected = theirs(published, aggregation)
    for n_rows in (len(LENGTHS), 2, 1):  # micro-batches of whole rows add up
        assert_equal(ours(gain, aggregation, n_rows), expected)
    assert differs(ours(other, aggregation), expected)
    assert all(differs(ours(gain, a), expected) for a in AGGREGATED if a != aggregation)


def test_some_responses_are_clipped_as_a_whole_and_some_are_not():
    log_ratio = sequence_log_ratio(START - OLD_LOGPS, IS_ACTION)
    found = clipped_surrogate(log_ratio, ADVANTAGES, 0.1, 0.15)
    for mask in (found.is_clipped_low, found.is_clipped_high):
        shares = (mask & IS_ACTION).sum(dim=1) / IS_ACTION.sum(dim=1)
        assert set(shares.tolist()) == {0.0, 1.0}


def test_clipped_tokens_of_cispo_are_counted_as_in_trl():
    # cispo_clip_ratio: ratio > epsilon_high and A > 0, with epsilon_high = 1 + high.
    ratio = (START - OLD_LOGPS).exp()
    found = clipped_weight(START - OLD_LOGPS, START, ADVANTAGES, 1.0, 0.3)
    is_high = IS_ACTION & (ratio > 1.3)
    assert torch.equal(found.is_clipped_high & IS_ACTION, is_high & (ADVANTAGES > 0))
    assert (is_high & (ADVANTAGES < 0)).any()
    assert not found.is_clipped_low.any()


def test_tokens_above_delta_have_no_gradient_and_are_counted():
    logps = START.clone().requires_grad_()
    found = clipped_surrogate(logps - OLD_LOGPS, ADVANTAGES, 0.2, 0.2, DELTA)
    expected = IS_ACTION & ((START - OLD_LOGPS).exp() > DELTA) & (ADVANTAGES < 0)
    assert torch.equal(found.is_clipped_delta & IS_ACTION, expected)
    assert expected.any()
    (gradient,) = torch.autograd.grad(weighted_sum(found.gain, IS_ACTION.double()), logps)
    assert (gradient[expected] == 0).all()
    assert not clipped_surrogate(START - OLD_LOGPS, ADVANTAGES, 0.2, 0.2).is_clipped_delta.any()


# sequence-level importance weights


def by_sequence(decide: Callable[[float], float]) -> list[float]:
    """Return decide(Π_t ρ_t) for every response token, in the order of the batch."""
    found = []
    for row, length in enumerate(LENGTHS):
        product = math.prod(math.exp(x) for x in (START - OLD_LOGPS)[row, 2 : 2 + length].tolist())
        found += [decide(product)] * length
    return found


@pytest.mark.parametrize(
    ("weigh", "of_tokens", "decide"),
    [
        # TRL: sequence_truncate, sequence_mask; verl: rollout_is=sequence with "2.0" and with "0.5_2.0"
        (sequence_truncated, truncated, lambda product: min(product, 2.0)),
        (sequence_masked, masked, lambda product: product if 0.5 <= product <= 2.0 else 0.0),
    ],
)
def test_sequence_level_weights_are_those_of_trl_and_verl(weigh, of_tokens, decide):
    found: ISWeights = weigh(START - OLD_LOGPS, IS_ACTION)
    expected = by_sequence(decide)
    assert found.weight[IS_ACTION].tolist() == pytest.approx(expected, **EXACT)
    assert torch.equal(found.is_counted, IS_ACTION)  # a response of weight 0 stays in denominators
    assert len({round(value, 9) for value in expected}) > 3
    per_token = of_tokens(START - OLD_LOGPS, IS_ACTION).weight[IS_ACTION]
    assert (found.weight[IS_ACTION] - per_token).abs().max() > 0.5


@pytest.mark.parametrize("weigh", [sequence_truncated, sequence_masked])
@pytest.mark.parametrize("size", [800.0, -800.0])
def test_products_beyond_the_range_of_floats_give_finite_weights(weigh, size):
    log_ratio = torch.full(IS_ACTION.shape, size)
    assert weigh(log_ratio, IS_ACTION).weight[IS_ACTION].isfinite().all()


def test_the_expected_gradient_of_bias_corrected_k3_is_that_of_the_kl_and_of_plain_k3_is_not():
    old, ref = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]))
    logits = torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64, requires_grad=True)
    logps = logits.log_softmax(-1)

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    exact = gradient((logps.exp() * (logps - ref.log())).sum())
    token_kl = k3(logps, ref.log())
    corrected = gradient((old * bias_corrected(token_kl, logps, old.log())).sum())
    torch.testing.assert_close(corrected, exact, rtol=1e-12, atol=1e-14)
    assert (gradient((old * token_kl).sum()) - exact).abs().max() > 0.05


# entropy bonus


def entropy_and_gradients(of: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    entropy = of(hidden, weight)
    return [entropy.detach(), *torch.autograd.grad((entropy * torch.arange(7)).sum(), (hidden, weight))]


@pytest.mark.parametrize("vocab_size", [11, 2**23])
def test_entropy_and_its_gradient_are_those_of_the_definition(vocab_size):
    # A large vocab_size cuts the positions into chunks of two.
    def by_definition(hidden, weight):
        logps = (hidden @ weight.T / 0.7).log_softmax(-1)
        return -(logps.exp() * logps).sum(-1)

    expected = entropy_and_gradients(by_definition)
    found = entropy_and_gradients(lambda h, w: token_entropy(h, lambda x: x @ w.T, 0.7, vocab_size))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    other = entropy_and_gradients(lambda h, w: token_entropy(h, lambda x: x @ w.T, 1.0, vocab_size))
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(other, expected, strict=True))
    assert expected[1].abs().max() > 0.1


# top-entropy quantile


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 1 / 3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("n_decimals", [8, 0])  # without and with ties
def test_tokens_of_high_entropy_are_those_of_trl(share, n_decimals):
    # get_high_entropy_mask: entropy >= torch.quantile(entropies of the completion tokens, 1 - share).
    entropy = draw(1.0, 5).abs().round(decimals=n_decimals)
    threshold = torch.quantile(entropy[IS_ACTION], 1 - share)
    expected = (entropy >= threshold) & IS_ACTION
    found = has_high_entropy(entropy.masked_fill(~IS_ACTION, math.nan), IS_ACTION, share)
    assert torch.equal(found, expected)
    n_without_ties = math.floor(share * 31 + 1e-9) + 1  # of 32 tokens
    assert found.sum() == n_without_ties if n_decimals else found.sum() >= n_without_ties


def test_nothing_is_chosen_from_nothing():
    assert not has_high_entropy(draw(1.0, 5), torch.zeros_like(IS_ACTION), 0.2).any()
