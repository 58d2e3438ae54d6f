"""The losses as other trainers define them, by loops over tokens in double precision.

The formulas are those that TRL documents for its GRPOTrainer (`loss_type`, `epsilon`, `epsilon_high`,
`beta`), PPOTrainer, DPOTrainer and OnlineDPOTrainer, and those of the papers.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lit_rlkv.objectives.clipped import clipped_surrogate, clipped_value
from lit_rlkv.objectives.kl import k3
from lit_rlkv.objectives.preference import dpo_loss
from lit_rlkv.objectives.reduction import AGGREGATIONS, masked_sum, weighted_sum

MAX_NEW_TOKENS = 12
LENGTHS = [1, 9, 4, 12, 3, 7, 12, 2]
"""Lengths of eight responses; the prompt has two columns."""
PLACE = torch.arange(2 + MAX_NEW_TOKENS).expand(len(LENGTHS), -1) - 2
"""Position of a column in the response; negative in the prompt."""
IS_ACTION = PLACE.ge(0) & PLACE.lt(torch.tensor(LENGTHS)[:, None])

OURS = {"grpo": "sequence", "dapo": "token", "dr_grpo": "constant"}
"""Our aggregation for each loss_type of TRL."""


def draw(scale: float, seed: int) -> Tensor:
    return scale * torch.randn(IS_ACTION.shape, generator=torch.Generator().manual_seed(seed))


# Ratios on both sides of every clip; junk outside the actions, which no loss may notice.
OLD_LOGPS = (-1.0 + draw(0.3, 0)).masked_fill(~IS_ACTION, math.nan)
LOGPS = OLD_LOGPS + draw(0.4, 1)
REF_LOGPS = OLD_LOGPS + draw(0.2, 2)
ADVANTAGES = torch.tensor([1.5, -0.5, 0.7, -1.2, -0.9, 0.3, 2.0, -1.0])

TokenLosses = list[list[float]]
"""The loss of each token, response by response."""


def token_losses(epsilon: float, epsilon_high: float, beta: float) -> TokenLosses:
    """−min(ρA, clip(ρ, 1 − ε, 1 + ε_high)·A) + β·(ref/π − log(ref/π) − 1), ρ = π/π_old."""
    losses = []
    for row, length in enumerate(LENGTHS):
        losses.append([])
        for column in range(2, 2 + length):
            logp, ref = float(LOGPS[row, column]), float(REF_LOGPS[row, column])
            ratio = math.exp(logp - float(OLD_LOGPS[row, column]))
            advantage = float(ADVANTAGES[row])
            bounded = min(max(ratio, 1 - epsilon), 1 + epsilon_high)
            kl = math.exp(ref - logp) - (ref - logp) - 1
            losses[-1].append(-min(ratio * advantage, bounded * advantage) + beta * kl)
    return losses


def grpo(losses: TokenLosses) -> float:
    """Return the mean over responses of the mean over their tokens."""
    return sum(sum(response) / len(response) for response in losses) / len(losses)


def bnpo(losses: TokenLosses) -> float:
    """Return the mean over the tokens of a batch."""
    return sum(map(sum, losses)) / sum(map(len, losses))


def dr_grpo(losses: TokenLosses) -> float:
    """Return the sum over the tokens, divided by responses times the longest length."""
    return sum(map(sum, losses)) / (len(losses) * MAX_NEW_TOKENS)


def dapo(losses: TokenLosses, n_tokens: int) -> float:
    """Return the sum over the tokens, divided by the tokens of the optimizer step on all ranks."""
    return sum(map(sum, losses)) / n_tokens


N_TOKENS = sum(LENGTHS)
PUBLISHED: dict[str, Callable[[TokenLosses], float]] = {
    "grpo": grpo,
    "dapo": lambda losses: dapo(losses, N_TOKENS),
    "dr_grpo": dr_grpo,
}


def our_loss(
    aggregation: str, clip_low: float, clip_high: float, beta: float, rows: slice = slice(None)
) -> float:
    """The policy's loss and its KL on some rows of a step, whose weights were settled as a whole."""
    weight = AGGREGATIONS[aggregation](IS_ACTION, MAX_NEW_TOKENS)[rows]
    advantages = torch.where(IS_ACTION, ADVANTAGES[:, None], 0.0)[rows]
    gain = clipped_surrogate(LOGPS[rows] - OLD_LOGPS[rows], advantages, clip_low, clip_high).gain
    kl = k3(LOGPS[rows], REF_LOGPS[rows])
    return (beta * weighted_sum(kl, weight) - weighted_sum(gain, weight)).item()


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("epsilon_high", [0.2, 0.28])
@pytest.mark.parametrize("loss_type", OURS)
def test_the_variants_of_grpo_equal_their_definitions(loss_type: str, epsilon_high: float, beta: float):
    expected = PUBLISHED[loss_type](token_losses(0.2, epsilon_high, beta))
    actual = our_loss(OURS[loss_type], 0.2, epsilon_high, beta)
    assert actual == pytest.approx(expected, rel=0, abs=1e-6)


def test_the_comparison_tells_variants_clips_and_kl_weights_apart():
    found = [
        PUBLISHED[loss_type](token_losses(0.2, epsilon_high, beta))
        for loss_type in OURS
        for epsilon_high in (0.2, 0.28)
        for beta in (0.0, 0.04)
    ]
    assert min(after - before for before, after in pairwise(sorted(found))) > 1e-5  # ten times the tolerance


@pytest.mark.parametrize("loss_type", OURS)
def test_micro_batches_add_up_to_the_loss_of_the_step(loss_type: str):
    whole = PUBLISHED[loss_type](token_losses(0.2, 0.28, 0.04))
    for n_rows in (1, 2, 4):
        slices = [slice(start, start + n_rows) for start in range(0, len(LENGTHS), n_rows)]
        parts = [our_loss(OURS[loss_type], 0.2, 0.28, 0.04, rows) for rows in slices]
        assert sum(parts) == pytest.approx(whole, rel=0, abs=1e-6)


def mean_of_micro_batches(loss: Callable[[TokenLosses], float], losses: TokenLosses, n_rows: int) -> float:
    """Return the mean over micro-batches of their losses."""
    parts = [losses[start : start + n_rows] for start in range(0, len(losses), n_rows)]
    return sum(map(loss, parts)) / len(parts)


@pytest.mark.parametrize("n_rows", [1, 2, 4, 8])
def test_grpo_and_dr_grpo_averaged_over_equal_micro_batches_are_the_same_losses(n_rows: int):
    losses = token_losses(0.2, 0.2, 0.0)
    for loss_type, published in (("grpo", grpo), ("dr_grpo", dr_grpo)):
        expected = mean_of_micro_batches(published, losses, n_rows)
        assert our_loss(OURS[loss_type], 0.2, 0.2, 0.0) == pytest.approx(expected, rel=0, abs=1e-6)


def test_bnpo_is_the_token_mean_where_a_step_is_one_batch():
    expected = bnpo(token_losses(0.2, 0.2, 0.04))
    assert our_loss("token", 0.2, 0.2, 0.04) == pytest.approx(expected, rel=0, abs=1e-6)


def test_bnpo_alone_depends_on_the_micro_batches_and_with_single_responses_is_grpo():
    losses = token_losses(0.2, 0.2, 0.04)
    token_mean = our_loss("token", 0.2, 0.2, 0.04)
    for n_rows in (1, 2, 4):
        assert abs(mean_of_micro_batches(bnpo, losses, n_rows) - token_mean) > 1e-4
    single = mean_of_micro_batches(bnpo, losses, 1)
    assert our_loss("sequence", 0.2, 0.2, 0.04) == pytest.approx(single, rel=0, abs=1e-6)


# PPO: advantages, values and returns of their own for every token.
TOKEN_ADVANTAGES, RETURNS = draw(1.0, 3), draw(1.0, 4)
OLD_VALUES = draw(0.5, 5).masked_fill(~IS_ACTION, math.nan)
VALUES = OLD_VALUES + draw(0.3, 6)


def ppo_by_definition(clip: float, value_clip: float, value_weight: float) -> float:
    """Σ over tokens of −min(ρA, clip(ρ)·A) + w·max((V − R)², (V_clip − R)²)/2, divided by their number.

    V_clip is V kept within V_old ± value_clip.
    """
    total = 0.0
    for row, length in enumerate(LENGTHS):
        for column in range(2, 2 + length):
            ratio = math.exp(float(LOGPS[row, column]) - float(OLD_LOGPS[row, column]))
            advantage = float(TOKEN_ADVANTAGES[row, column])
            policy = -min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)
            value, old = float(VALUES[row, column]), float(OLD_VALUES[row, column])
            target = float(RETURNS[row, column])
            bounded = min(max(value, old - value_clip), old + value_clip)
            total += policy + value_weight * max((value - target) ** 2, (bounded - target) ** 2) / 2
    return total / N_TOKENS


def our_ppo(clip: float, value_clip: float | None, value_weight: float) -> float:
    weight = AGGREGATIONS["token"](IS_ACTION, MAX_NEW_TOKENS)
    policy_loss = -weighted_sum(
        clipped_surrogate(LOGPS - OLD_LOGPS, TOKEN_ADVANTAGES, clip, clip).gain, weight
    )
    value_loss = weighted_sum(clipped_value(VALUES, OLD_VALUES, RETURNS, value_clip).loss, weight)
    return (policy_loss + value_weight * value_loss).item()


@pytest.mark.parametrize("value_clip", [0.2, 0.05])
def test_ppo_equals_its_definition(value_clip: float):
    expected = ppo_by_definition(0.2, value_clip, 0.1)
    assert our_ppo(0.2, value_clip, 0.1) == pytest.approx(expected, rel=0, abs=1e-6)


def test_the_comparison_catches_values_that_are_not_clipped():
    assert abs(our_ppo(0.2, None, 0.1) - ppo_by_definition(0.2, 0.2, 0.1)) > 1e-3
    assert our_ppo(0.2, None, 0.1) == pytest.approx(ppo_by_definition(0.2, 1e9, 0.1), rel=0, abs=1e-6)


def margins_by_definition(averages: bool) -> list[float]:
    """Return Σ_t (log π − log π_ref) of each response, or the mean over its tokens."""
    margins = []
    for row, length in enumerate(LENGTHS):
        columns = range(2, 2 + length)
        total = sum(float(LOGPS[row, column]) - float(REF_LOGPS[row, column]) for column in columns)
        margins.append(total / length if averages else total)
    return margins


def our_margins(averages: bool) -> Tensor:
    log_ratio = LOGPS - REF_LOGPS
    margins = torch.stack([masked_sum(*row) for row in zip(log_ratio, IS_ACTION, strict=True)])
    return margins / IS_ACTION.sum(dim=1) if averages else margins


def dpo_by_definition(h: float, kind: str, beta: float, smoothing: float) -> float:
    """sigmoid: −(1 − ε)·log σ(βh) − ε·log σ(−βh), ipo: (h − 1/(2β))²."""
    if kind == "ipo":
        return (h - 1 / (2 * beta)) ** 2
    probability = 1 / (1 + math.exp(-beta * h))
    return -(1 - smoothing) * math.log(probability) - smoothing * math.log(1 - probability)


@pytest.mark.parametrize(
    ("kind", "averages", "smoothing"),
    [
        ("sigmoid", False, 0.0),  # DPO, offline and online
        ("sigmoid", False, 0.1),  # conservative DPO
        ("ipo", False, 0.0),  # the paper's, and OnlineDPOTrainer's
        ("ipo", True, 0.0),  # DPOTrainer's
    ],
)
def test_losses_of_pairs_equal_their_definitions(kind: str, averages: bool, smoothing: float):
    chosen, rejected = our_margins(averages).view(-1, 2).unbind(1)
    loss = dpo_loss(chosen, rejected, beta=0.5, kind=kind, label_smoothing=smoothing).mean()
    margins = margins_by_definition(averages)
    pairs = zip(margins[::2], margins[1::2], strict=True)
    expected = [dpo_by_definition(better - worse, kind, 0.5, smoothing) for better, worse in pairs]
    assert loss.item() == pytest.approx(sum(expected) / len(expected), rel=0, abs=1e-6)
    swapped = dpo_loss(rejected, chosen, beta=0.5, kind=kind, label_smoothing=smoothing).mean()
    assert abs(swapped.item() - loss.item()) > 0.01
