"""Advantage estimators: from rewards to advantages by group baselines, a critic, or preference pairs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rlkv.checks import Range
from lit_rlkv.config.schema import AlgorithmConfig
from lit_rlkv.experience import group_baselines as group
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.gae import discounted_sums, gae, returns, token_rewards, whiten
from lit_rlkv.experience.score import ENTROPY
from lit_rlkv.objectives.entropy import has_high_entropy
from lit_rlkv.objectives.preference import best_and_worst
from lit_rlkv.rng import stream
from lit_rlkv.types import Rollout


@dataclass(frozen=True)
class Advantages:
    """The advantage of each response token, and the rows that one minibatch must keep together."""

    advantages: Float[Tensor, "batch seq"]
    is_counted: Bool[Tensor, "batch seq"]
    """Response tokens in the policy's loss. Rows of `units` without any stay, for distillation."""
    units: Int[Tensor, "unit member"]
    """Rows of one unit stay in one minibatch: a single row, or a chosen and a rejected response."""
    returns: Float[Tensor, "batch seq"] | None = None
    is_chosen: Bool[Tensor, "batch seq"] | None = None
    """Tokens that a loss treats in another way; None without a choice."""


class AdvantageEstimator(ABC):
    """Base of the advantage estimators; subclass it for an algorithm of your own."""

    needs: tuple[str, ...] = ()
    """Roles that must score each rollout, for example `("value",)`."""
    statistics: tuple[str, ...] = ()
    """Statistics of the policy to score each rollout for: `lit_rlkv.experience.score.ENTROPY`, or none."""
    needs_greedy = False
    """True to sample a greedy response to each prompt, for its reward alone."""
    min_group_size = 1
    gamma: float | int = 1.0

    def check(self, algorithm: AlgorithmConfig) -> None:
        """Check the options of the algorithm that learns from these advantages.

        Raises:
            ValueError: an option does not fit them.
        """
        if algorithm.group_size < self.min_group_size:
            raise ValueError(
                f"algorithm.group_size={algorithm.group_size}: {type(self).__name__} compares responses to "
                f"one prompt; give at least {self.min_group_size}"
            )
        if algorithm.critic_warmup >= (algorithm.n_iterations if "value" in self.needs else 1):
            raise ValueError(
                f"algorithm.critic_warmup={algorithm.critic_warmup}: give 0 without a critic, and fewer than "
                f"n_iterations={algorithm.n_iterations} with one"
            )

    @abstractmethod
    def compute(self, experience: Experience) -> Advantages:
        """Return the advantages of all response tokens; it may be called more than once for a rollout."""


def _single_rows(rollout: Rollout) -> Int[Tensor, "batch 1"]:
    return torch.arange(len(rollout.input_ids), device=rollout.input_ids.device)[:, None]


def _check_discounts(**discounts: float) -> None:
    for name, value in discounts.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is no discount; give a number between 0 and 1")


class GroupAdvantage(AdvantageEstimator):
    """Every response token gets the advantage of its response within its group.

    Args:
        estimator: one of `lit_rlkv.experience.group_baselines.ESTIMATORS`.
        filter_zero_std_groups: drop groups whose rewards are all equal, as DAPO does (arXiv:2503.14476).
        top_entropy_quantile: share of the response tokens, those of the highest entropy, that the policy's
            objective learns from; see `has_high_entropy`. The others stay in denominators, as in TRL.
        choose: function such as `by_covariance`, which chooses tokens for a loss by π_old; None: none.

    Raises:
        ValueError: the estimator is unknown, or `top_entropy_quantile` is not between 0 and 1.
    """

    min_group_size = 2

    def __init__(
        self,
        estimator: str,
        filter_zero_std_groups: bool = False,
        top_entropy_quantile: float | int = 1.0,
        choose: Callable[..., Tensor] | None = None,
    ) -> None:
        if estimator not in group.ESTIMATORS:
            raise ValueError(
                f"estimator={estimator!r} is unknown; choose one of {', '.join(group.ESTIMATORS)}"
            )
        Range(least=0, most=1).check("top_entropy_quantile", top_entropy_quantile)
        self.top_entropy_quantile = top_entropy_quantile
        self.statistics = () if top_entropy_quantile == 1 else (ENTROPY,)
        self.estimator = estimator
        self.choose = choose
        if choose is not None:  # it checks its options
            choose(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), None)
        self.filter_zero_std_groups = filter_zero_std_groups

    def compute(self, experience: Experience) -> Advantages:
        """Return the group advantage of R − Σ_t β·KL_t at every token of a response; see `ESTIMATORS`.

        `filter_zero_std_groups` compares R alone, or each part of it (gdpo). A response whose reward failed
        gets advantage 0 and does not enter its group's baseline.

        Args:
            experience: whole groups, the `group_size` rows of a group side by side.

        Returns:
            Advantages [batch, seq], 0 outside `response_mask`, in standard deviations or the reward's unit;
            units [batch, 1], one row each; no returns.
        """
        rollout, given = experience.rollout, experience.rewards
        parts = {"total": given.total}
        if given.weights is not None:
            parts = {name: given.components[name] for name in given.weights}
            parts["penalties"] = given.total - given.scores
        is_valid = torch.ones_like(given.total, dtype=torch.bool)
        if given.is_failed is not None:
            is_valid = ~given.is_failed

        def of_group(values: Tensor) -> Tensor:
            return values.view(-1, experience.group_size)

        groups = group.Groups(
            rewards=of_group(given.total - experience.kl_penalty.sum(dim=1)),
            is_valid=of_group(is_valid),
            lengths=of_group(rollout.response_mask.sum(dim=1)),
            parts={name: of_group(part) for name, part in parts.items()},
            weights=given.weights or {},
        )
        is_counted = experience.weights.is_counted
        if self.filter_zero_std_groups:  # without the KL, with which rewards are never equal
            compared = groups.parts.values() if self.estimator in group.BY_PART else [of_group(given.total)]
            differs = torch.stack([group.is_informative(rewards) for rewards in compared]).any(dim=0)
            is_counted = is_counted & differs.repeat_interleave(experience.group_size)[:, None]
        found = group.ESTIMATORS[self.estimator](groups)
        advantages = group.broadcast_to_response(found.flatten(), rollout.response_mask)
        if experience.entropy is not None:
            is_learned = has_high_entropy(experience.entropy, is_counted, self.top_entropy_quantile)
            advantages = advantages.masked_fill(~is_learned, 0.0)
        is_chosen = None
        if self.choose is not None:
            draws = stream(experience.seed, "choose", experience.iteration)
            is_chosen = self.choose(advantages, experience.old_logps, is_counted, draws)
        return Advantages(advantages, is_counted, _single_rows(rollout), is_chosen=is_chosen)


class GAEAdvantage(AdvantageEstimator):
    """Generalised advantage estimation from the critic's values (arXiv:1506.02438).

    Args:
        gamma: discount per response token.
        lam: the λ of GAE; 1 uses the rewards alone, 0 only the next value.
        whiten_advantages: scale advantages, not returns, to mean 0 and standard deviation 1.

    Raises:
        ValueError: `gamma` or `lam` is not between 0 and 1.
    """

    needs = ("value",)

    def __init__(self, gamma: float | int, lam: float | int, whiten_advantages: bool = True) -> None:
        _check_discounts(gamma=gamma, lam=lam)
        self.gamma = gamma
        self.lam = lam
        self.whiten_advantages = whiten_advantages

    def compute(self, experience: Experience) -> Advantages:
        """Return advantages and returns from r_t = −β·KL_t, plus the total reward at the last response token.

        Rewards are placed as in arXiv:1909.08593; see `gae` and `returns`.

        Args:
            experience: with the critic's values before its first update, in the reward's unit.

        Returns:
            Advantages and returns [batch, seq], 0 outside `response_mask`, in the reward's unit (whitened
            advantages in standard deviations); units [batch, 1], one row each.
        """
        rollout, values = experience.rollout, experience.values
        assert values is not None
        response_mask = rollout.response_mask
        rewards = token_rewards(experience.rewards.total, response_mask, experience.kl_penalty)
        advantages = gae(rewards, values, response_mask, gamma=self.gamma, lam=self.lam)
        is_counted = experience.weights.is_counted
        return Advantages(
            advantages=whiten(advantages, is_counted) if self.whiten_advantages else advantages,
            is_counted=is_counted,
            units=_single_rows(rollout),
            returns=returns(advantages, values, response_mask),
        )


class ReturnAdvantage(AdvantageEstimator):
    """Discounted returns, whitened over the tokens of all responses: REINFORCE++ (arXiv:2501.03262).

    No group baseline and no critic, so one response to a prompt is enough.

    Args:
        gamma: discount per response token.
        whiten_advantages: scale the returns to mean 0 and standard deviation 1.
        greedy_baseline: subtract the reward of a greedy response to the prompt, as ReMax (arXiv:2310.10505).

    Raises:
        ValueError: `gamma` is not between 0 and 1.
    """

    def __init__(
        self, gamma: float | int = 1.0, whiten_advantages: bool = True, greedy_baseline: bool = False
    ) -> None:
        _check_discounts(gamma=gamma)
        self.gamma = gamma
        self.whiten_advantages = whiten_advantages
        self.needs_greedy = greedy_baseline

    def compute(self, experience: Experience) -> Advantages:
        """Return Σ_n γ^n·r_{t+n} at each token, of r_t = −β·KL_t plus the total reward at the last token.

        As in verl, the KL of the greedy response is not in the baseline.

        Returns:
            Advantages [batch, seq], 0 outside `response_mask`, in standard deviations or the reward's unit;
            units [batch, 1], one row each; no returns.
        """
        rollout, is_counted = experience.rollout, experience.weights.is_counted
        rewards = token_rewards(experience.rewards.total, rollout.response_mask, experience.kl_penalty)
        sums = discounted_sums(rewards, rollout.response_mask, self.gamma)
        if self.needs_greedy:
            assert experience.greedy_rewards is not None
            sums = sums - group.broadcast_to_response(experience.greedy_rewards, rollout.response_mask)
        advantages = whiten(sums, is_counted) if self.whiten_advantages else sums
        return Advantages(advantages, is_counted, _single_rows(rollout))


class PairAdvantage(AdvantageEstimator):
    """The best and the worst response to each prompt form a preference pair: advantage 1 and −1.

    Args:
        drop_ties: a pair with equal rewards does not count; if False, its first response is chosen.
    """

    needs = ("reference",)
    min_group_size = 2

    def __init__(self, drop_ties: bool = True) -> None:
        self.drop_ties = drop_ties

    def check(self, algorithm: AlgorithmConfig) -> None:
        super().check(algorithm)
        if algorithm.kl.place == "reward":
            raise ValueError(
                "algorithm.kl.place=reward has no meaning for preference pairs, whose loss pulls to the "
                "reference by beta; use place=loss or weight=0"
            )

    def compute(self, experience: Experience) -> Advantages:
        """Return 1 at the tokens of each group's best response, −1 at those of its worst, 0 elsewhere.

        `best_and_worst` ranks by the total reward without the KL penalty.

        Args:
            experience: whole groups, the `group_size` rows of a group side by side.

        Returns:
            Advantages [batch, seq]; units [prompt, 2], the chosen row before the rejected one; no returns.
            Rows in no unit are not trained on; a dropped tie has a unit and does not count.
        """
        rollout, group_size = experience.rollout, experience.group_size
        best, worst, is_tie = best_and_worst(experience.rewards.total.view(-1, group_size))
        first_row = torch.arange(len(best), device=best.device) * group_size
        pairs = torch.stack([first_row + best, first_row + worst], dim=1)
        side = torch.zeros(len(rollout.input_ids), device=best.device)
        is_counted = ~is_tie if self.drop_ties else torch.ones_like(is_tie)
        side[pairs[:, 0]] = is_counted.float()
        side[pairs[:, 1]] = -is_counted.float()
        advantages = group.broadcast_to_response(side, rollout.response_mask)
        return Advantages(advantages, experience.weights.is_counted & (advantages != 0), pairs)
