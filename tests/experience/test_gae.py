import math

import pytest
import torch
from torch import Tensor

from lit_rlkv.experience.gae import discounted_sums, explained_variance, gae, returns, token_rewards, whiten

# Two columns of prompt, then responses of four, two and one actions, then padding.
LENGTHS = [4, 2, 1]
PLACE = torch.arange(7).expand(3, 7) - 2
"""Position of a column in the response; negative in the prompt."""
IS_ACTION = PLACE.ge(0) & PLACE.lt(torch.tensor(LENGTHS)[:, None])


def draw(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(seed), dtype=dtype)


REWARDS, VALUES = draw(0), draw(1)


def advantages_by_definition(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    value_after_end: float = 0.0,
) -> Tensor:
    """A_t = Σ_l (γλ)^l·δ_{t+l}, as a loop over t and a loop over l."""
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        columns = response_mask[row].nonzero().flatten().tolist()
        r, v = rewards[row, columns].tolist(), [*values[row, columns].tolist(), value_after_end]
        for t, column in enumerate(columns):
            deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(t, len(columns))]
            advantages[row, column] = sum((gamma * lam) ** n * delta for n, delta in enumerate(deltas))
    return advantages


def test_the_reward_comes_with_the_last_action_and_every_action_pays_for_its_kl():
    response_mask = torch.tensor([[False, True, True, False], [False, True, False, False]])
    kl = torch.tensor([[math.nan, 1.0, 2.0, math.nan], [math.nan, -3.0, math.nan, math.nan]])
    # 10 − 0.5·2 at the end of the first row, 20 + 0.5·3 at the only action of the second
    expected = [[0.0, -0.5, 9.0, 0.0], [0.0, 21.5, 0.0, 0.0]]
    assert token_rewards(torch.tensor([10.0, 20.0]), response_mask, 0.5 * kl).tolist() == expected


def test_a_response_that_fills_the_rollout_is_rewarded_in_the_last_column():
    response_mask = torch.tensor([[False, True, True]])
    assert token_rewards(torch.ones(1), response_mask, torch.zeros(1, 3)).tolist() == [[0.0, 0.0, 1.0]]


def test_a_row_without_response_tokens_gets_no_advantage():
    no_action = torch.zeros(1, 3, dtype=torch.bool)
    assert token_rewards(torch.tensor([math.nan]), no_action, torch.ones(1, 3)).tolist() == [[0.0] * 3]
    assert gae(torch.ones(1, 3), torch.ones(1, 3), no_action, gamma=0.9, lam=0.9).tolist() == [[0.0] * 3]


def test_gae_matches_hand_arithmetic():
    # γ = 1/2, λ = 1/2, rewards 0, 1, 4 and values 2, 4, 6:
    # δ = 0 + 4/2 − 2, 1 + 6/2 − 4, 4 − 6 = 0, 0, −2; A_3 = −2, A_2 = 0 − 2/4, A_1 = 0 − 1/2/4
    response_mask = torch.tensor([[False, True, True, True, False]])
    rewards = torch.tensor([[9.0, 0.0, 1.0, 4.0, 9.0]])
    values = torch.tensor([[9.0, 2.0, 4.0, 6.0, 9.0]])
    expected = [[0.0, -0.125, -0.5, -2.0, 0.0]]
    assert gae(rewards, values, response_mask, gamma=0.5, lam=0.5).tolist() == expected


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (0.7, 1.0)])
def test_gae_equals_its_definition(gamma: float, lam: float):
    expected = advantages_by_definition(REWARDS, VALUES, IS_ACTION, gamma, lam)
    actual = gae(REWARDS, VALUES, IS_ACTION, gamma=gamma, lam=lam)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    single = gae(REWARDS.float(), VALUES.float(), IS_ACTION, gamma=gamma, lam=lam)
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-6)


def test_the_comparison_catches_a_value_taken_from_behind_the_last_action():
    bootstrapped = advantages_by_definition(REWARDS, VALUES, IS_ACTION, 1.0, 0.95, value_after_end=0.5)
    actual = gae(REWARDS, VALUES, IS_ACTION, gamma=1.0, lam=0.95)
    assert (bootstrapped - actual)[IS_ACTION].abs().min() > 0.3


@pytest.mark.parametrize("discount", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("seq", [1, 2, 7, 8, 9])
def test_discounted_sums_are_those_of_their_definition(seq: int, discount: float):
    values = torch.randn(2, seq, generator=torch.Generator().manual_seed(seq), dtype=torch.float64)
    expected = [
        [sum(discount**n * value for n, value in enumerate(row[t:])) for t in range(seq)]
        for row in values.tolist()
    ]
    everything = torch.ones(2, seq, dtype=torch.bool)
    torch.testing.assert_close(discounted_sums(values, everything, discount), values.new_tensor(expected))


TURNS = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [0, 1, 0, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0, 0]]).bool()
"""Prompts of one column, then sampled tokens with given ones between them."""


def test_the_reward_of_several_turns_comes_with_the_last_token_of_the_last():
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0]), TURNS, torch.zeros(3, 7))
    assert rewards.nonzero().tolist() == [[0, 5], [1, 6], [2, 3]]


def test_gae_over_turns_matches_hand_arithmetic():
    # As above, γ = 1/2 and λ = 1/2, rewards 0, 1, 4 and values 2, 4, 6, with given tokens between them.
    response_mask = torch.tensor([[False, True, False, False, True, True, False]])
    rewards = torch.tensor([[9.0, 0.0, 9.0, 9.0, 1.0, 4.0, 9.0]])
    values = torch.tensor([[9.0, 2.0, 9.0, 9.0, 4.0, 6.0, 9.0]])
    expected = [[0.0, -0.125, 0.0, 0.0, -0.5, -2.0, 0.0]]
    assert gae(rewards, values, response_mask, gamma=0.5, lam=0.5).tolist() == expected
    # 0 + 1/2 + 4/4, 1 + 4/2, 4
    assert discounted_sums(rewards, response_mask, 0.5).tolist() == [[0.0, 1.5, 0.0, 0.0, 3.0, 4.0, 0.0]]


def test_gae_over_turns_equals_its_definition():
    expected = advantages_by_definition(REWARDS, VALUES, TURNS, 0.9, 0.8)
    torch.testing.assert_close(gae(REWARDS, VALUES, TURNS, gamma=0.9, lam=0.8), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e30])
def test_values_outside_the_response_mask_do_not_matter(junk: float):
    def spoilt(values: Tensor) -> Tensor:
        return values.masked_fill(~IS_ACTION, junk)

    clean = gae(REWARDS, VALUES, IS_ACTION, gamma=0.9, lam=0.8)
    dirty = gae(spoilt(REWARDS), spoilt(VALUES), IS_ACTION, gamma=0.9, lam=0.8)
    assert torch.equal(dirty, clean)
    assert (clean[~IS_ACTION] == 0).all()
    assert torch.equal(returns(spoilt(clean), spoilt(VALUES), IS_ACTION), returns(clean, VALUES, IS_ACTION))
    torch.testing.assert_close(whiten(spoilt(clean), IS_ACTION), whiten(clean, IS_ACTION))
    spoilt_variance = explained_variance(spoilt(VALUES), spoilt(REWARDS), IS_ACTION)
    assert torch.equal(spoilt_variance, explained_variance(VALUES, REWARDS, IS_ACTION))


def test_returns_are_advantages_and_values_together():
    advantages = gae(REWARDS, VALUES, IS_ACTION, gamma=0.9, lam=1.0)
    found = returns(advantages, VALUES, IS_ACTION)
    torch.testing.assert_close(found[IS_ACTION], (advantages + VALUES)[IS_ACTION])
    assert (found[~IS_ACTION] == 0).all()
    # The one action of the third row returns its reward, whatever its value.
    assert found[2, 2].item() == pytest.approx(REWARDS[2, 2].item(), abs=1e-12)


def test_whitened_advantages_match_hand_arithmetic():
    # 1, 2, 3 and 6: mean 3, unbiased variance (4 + 1 + 0 + 9)/3 = 14/3.
    is_counted = torch.tensor([[True, True, False], [True, True, False]])
    advantages = torch.tensor([[1.0, 2.0, 50.0], [3.0, 6.0, -50.0]])
    std = math.sqrt(14 / 3) + 1e-4
    expected = [-2 / std, -1 / std, 0.0, 0.0, 3 / std, 0.0]
    assert whiten(advantages, is_counted).flatten().tolist() == pytest.approx(expected)


def test_whitening_is_over_all_rows_and_not_row_by_row():
    whitened = whiten(VALUES, IS_ACTION)
    counted = whitened[IS_ACTION]
    assert counted.mean().item() == pytest.approx(0.0, abs=1e-9)
    assert counted.std().item() == pytest.approx(1.0, abs=1e-3)
    assert abs(whitened[0][IS_ACTION[0]].mean().item()) > 0.05


def test_whitening_what_does_not_vary_gives_zeros():
    one = torch.zeros_like(IS_ACTION)
    one[0, 3] = True
    for is_counted in (one, torch.zeros_like(one)):
        assert (whiten(VALUES, is_counted) == 0).all()
    for size in (2.5, 0.1, 2345.6, 999_999.9):
        assert (whiten(torch.full((3, 7), size), IS_ACTION) == 0).all()


def test_explained_variance_matches_hand_arithmetic():
    # Returns 0, 2, 4 vary by 4; errors 0, 1, −1 by 1: three quarters are explained.
    response_mask = torch.tensor([[False, True, True, True]])
    found, target = torch.tensor([[9.0, 0.0, 1.0, 5.0]]), torch.tensor([[7.0, 0.0, 2.0, 4.0]])
    assert explained_variance(found, target, response_mask).item() == pytest.approx(0.75)


def test_explained_variance_is_one_for_the_returns_zero_for_a_constant_and_negative_below():
    assert explained_variance(REWARDS, REWARDS, IS_ACTION).item() == 1.0
    constant = torch.full_like(REWARDS, 0.7)
    assert explained_variance(constant, REWARDS, IS_ACTION).item() == pytest.approx(0.0, abs=1e-9)
    assert explained_variance(-REWARDS, REWARDS, IS_ACTION).item() == pytest.approx(-3.0)


def test_explained_variance_of_returns_that_do_not_vary_is_zero():
    # The mean of three times 0.1 is not 0.1 in float32: a variance computed from it would not be 0.
    constant = torch.full((3, 7), 0.1)
    assert explained_variance(VALUES.float(), constant, IS_ACTION).item() == 0.0
    assert explained_variance(VALUES, REWARDS, torch.zeros_like(IS_ACTION)).item() == 0.0
