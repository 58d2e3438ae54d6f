"""Tests of the policy gradient of evictions as pure functions."""

import math

import pytest
import torch

from lit_rlkv.experience.gae import gae
from lit_rlkv.kvcache.scorer import KVShape, LayerScorer
from lit_rlkv.models.set_logps import set_logps
from lit_rlkv.objectives.evictions import advantages_of_decisions, eviction_sums, kl_to_uniform


def test_a_decision_has_the_advantage_of_the_last_counted_token_that_it_cannot_change():
    advantages = torch.tensor([[9.0, 1.0, 2.0, torch.nan, 7.0, torch.nan]] * 2)
    is_counted = torch.tensor([[False, True, True, False, True, False], [False] * 6])
    # Before the first token its own; at 2 and 3 that of 2; from the last on there is nothing to change.
    now = torch.tensor([[0, 1, 2, 3, 4, 5]] * 2, dtype=torch.int32)
    found = advantages_of_decisions(advantages, is_counted, now)
    assert found.tolist() == [[1.0, 1.0, 2.0, 2.0, 0.0, 0.0], [0.0] * 6]


@pytest.mark.parametrize("is_response", [[0, 1, 1, 1, 1], [0, 1, 1, 0, 1]])
def test_under_gae_a_decision_gets_the_change_of_value_that_it_makes(is_response: list[int]):
    """An exact critic: 0.5 before the eviction, then 1 in the row that keeps the key and 0 in the other."""
    response_mask = torch.tensor([is_response] * 2).bool()
    values = torch.tensor([[0.0, 0.5, 0.5, 1.0, 1.0], [0.0, 0.5, 0.5, 0.0, 0.0]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0], [0.0] * 5])
    advantages = gae(rewards, values, response_mask, gamma=1.0, lam=0.95)
    now = torch.full((2, 1), 2)
    assert advantages_of_decisions(advantages, response_mask, now).tolist() == [[0.5], [-0.5]]
    assert advantages[:, 3:].abs().max() == 0  # the baselines of later tokens have seen the eviction


def test_sums_match_hand_arithmetic():
    # Ratios 1, 2 and 0.5 with advantages 1, 1 and −1; clipped at 1.2 and 0.8; the fourth is no decision.
    logps = torch.tensor([[[0.0, math.log(2.0), math.log(0.5), 5.0]]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, 1.0]])
    is_decision = torch.tensor([[[True, True, True, False]]])
    kl = torch.tensor([[[0.1, 0.2, 0.3, torch.nan]]])
    found = eviction_sums(logps, torch.zeros_like(logps), advantages, is_decision, kl, 0.2)
    assert float(found.gain) == pytest.approx(1.0 + 1.2 - 0.8)
    assert float(found.kl) == pytest.approx(0.6)
    assert float(found.logps) == pytest.approx(0.0, abs=1e-6)
    assert int(found.n_clipped) == 2


def test_kl_to_uniform_is_log_n_less_the_entropy_of_the_candidates():
    scores = torch.tensor([[1.0, 2.0, torch.nan], [3.0, 3.0, 3.0], [0.0, 1.0, 2.0]])
    is_candidate = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    p = 1 / (1 + math.e)
    expected = math.log(2) + p * math.log(p) + (1 - p) * math.log(1 - p)
    assert kl_to_uniform(scores, is_candidate).tolist() == pytest.approx([expected, 0.0, 0.0], abs=1e-6)


def recall_accuracy(scorer: LayerScorer, generator: torch.Generator, marked: bool = True) -> float:
    """Share of draws of 4 of 12 keys that keep the marked one."""
    keys, values, log_age = recall_keys(256, generator)
    with torch.no_grad():
        scores = scorer(keys, values, log_age)
    noise = torch.empty_like(scores).exponential_(generator=generator).log()
    kept = (scores - noise).topk(4, dim=-1).indices
    return float((kept == 5).any(-1).float().mean())


def recall_keys(n: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Random keys and values of 12 slots; the one in slot 5, which a question will need, has a sign."""
    keys, values = (torch.randn(n, 1, 12, 6, generator=generator) for _ in range(2))
    keys[:, :, 5, 0] += 3.0
    order = torch.rand(n, 1, 1, 12, generator=generator).argsort(-1)  # its age says nothing
    return keys, values, order.float().log1p()


@pytest.mark.parametrize("is_rewarded", [True, False])
def test_a_scorer_learns_from_rewards_to_keep_the_key_that_matters(is_rewarded: bool):
    """A bandit: reward 1 if the marked key survives. The control's rewards know nothing of the evictions."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    scorer = LayerScorer(KVShape(1, 6, 6), hidden=8)
    optimizer = torch.optim.Adam(scorer.parameters(), lr=3e-2)
    assert recall_accuracy(scorer, generator) == pytest.approx(1 / 3, abs=0.1)
    for _ in range(120):
        scores = scorer(*recall_keys(64, generator))
        noise = torch.empty_like(scores).exponential_(generator=generator).log()
        kept = (scores.detach() - noise).topk(4, dim=-1).indices
        is_kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, kept, True)
        reward = is_kept[:, 0, :, 5].float()
        if not is_rewarded:
            reward = torch.rand(reward.shape, generator=generator).round()
        logps = set_logps(scores, is_kept, torch.ones_like(is_kept))
        zeros, ones = torch.zeros_like(logps), torch.ones_like(logps, dtype=torch.bool)
        sums = eviction_sums(logps, logps.detach(), reward - reward.mean(), ones, zeros, 0.2)
        optimizer.zero_grad()
        (-sums.gain / 64).backward()
        optimizer.step()
    found = recall_accuracy(scorer, generator)
    assert found > 0.9 if is_rewarded else found < 0.7
