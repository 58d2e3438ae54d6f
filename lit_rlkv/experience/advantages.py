"""From rewards to the advantage of each response token: group baselines, a critic, or preference pairs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rlkv.experience import group_baselines as group
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.gae import gae, returns, token_rewards, whiten
from lit_rlkv.objectives.preference import best_and_worst
from lit_rlkv.rewards.judges import tournament
from lit_rlkv.tasks import Task
from lit_rlkv.types import Problem, Rollout


@dataclass(frozen=True)
class Advantages:
    """What each action of a rollout is worth, and which rows must be learned from together."""

    advantages: Float[Tensor, "batch seq"]
    is_counted: Bool[Tensor, "batch seq"]
    """Actions that the policy's loss counts. Rows in `units` without any stay in, for distillation."""
    units: Int[Tensor, "unit member"]
    """Rows that no minibatch may part: single ones, or a better and a worse response."""
    returns: Float[Tensor, "batch seq"] | None = None


class AdvantageEstimator(ABC):
    """How an algorithm assigns credit."""

    needs: tuple[str, ...] = ()
    """Roles without which it cannot."""
    min_group_size = 1
    gamma: float | int = 1.0

    def for_task(self, task: Task) -> "AdvantageEstimator":
        """The same rule where it may ask the task's verifier."""
        return self

    def judge_all(
        self, problems: Sequence[Problem], completions: Sequence[str], group_size: int
    ) -> Float[Tensor, " batch"] | None:
        """What a judge makes of the responses, who is asked once, by the rank that has them; None without."""
        return None

    @abstractmethod
    def compute(self, experience: Experience) -> Advantages:
        """Advantages for every action of the rollout."""


def _single_rows(rollout: Rollout) -> Int[Tensor, "batch 1"]:
    return torch.arange(len(rollout.input_ids), device=rollout.input_ids.device)[:, None]


class GroupAdvantage(AdvantageEstimator):
    """Every action shares the advantage of its response over the others of its group.

    Args:
        estimator: one of `lit_rlkv.experience.group_baselines.ESTIMATORS`.
        filter_zero_std_groups: leave out groups that agree, as DAPO does (arXiv:2503.14476).

    Raises:
        ValueError: an unknown estimator.
    """

    min_group_size = 2

    def __init__(self, estimator: str, filter_zero_std_groups: bool = False) -> None:
        if estimator not in group.ESTIMATORS:
            raise ValueError(
                f"estimator={estimator!r} is unknown; choose one of {', '.join(group.ESTIMATORS)}"
            )
        self.estimate = group.ESTIMATORS[estimator]
        self.filter_zero_std_groups = filter_zero_std_groups

    def compute(self, experience: Experience) -> Advantages:
        """The estimator's advantage of each response, the same at all of its actions; see `ESTIMATORS`.

        It is that of R − Σ_t β·KL_t, the total reward less what the reward pays for the KL; `filter_zero_std_groups`
        looks at R alone. A response without a reward has advantage 0, and no part in its group's baseline.

        Args:
            experience: rows of whole groups, `group_size` of them side by side.

        Returns:
            Advantages [batch, seq], 0 outside the actions: in standard deviations, or in the reward's unit
            where the estimator divides by none. Units [batch, 1], every row by itself; no returns.
        """
        rollout, group_size = experience.rollout, experience.group_size
        total = experience.rewards.total
        rewards = (total - experience.kl_penalty.sum(dim=1)).view(-1, group_size)
        is_counted = experience.weights.is_counted
        if self.filter_zero_std_groups:  # by what was earned: after a KL in the reward no group would agree
            is_kept = group.is_informative(total.view(-1, group_size)).repeat_interleave(group_size)
            is_counted = is_counted & is_kept[:, None]
        is_failed = experience.rewards.is_failed
        if is_failed is not None and is_failed.any():
            found = group.without_failures(self.estimate, rewards, ~is_failed.view(-1, group_size))
        else:
            found = self.estimate(rewards)
        advantages = group.broadcast_to_response(found.flatten(), rollout.response_mask)
        return Advantages(advantages, is_counted, _single_rows(rollout))


class GAEAdvantage(AdvantageEstimator):
    """Generalised advantage estimation from the critic's values (arXiv:1506.02438).

    Args:
        gamma: discount of a reward for each action that it is away.
        lam: the λ of the estimator; 1 trusts the rewards alone, 0 the next value.
        whiten_advantages: advantages get mean 0 and standard deviation 1 over the actions counted; returns do not.

    Raises:
        ValueError: `gamma` or `lam` is not between 0 and 1.
    """

    needs = ("value",)

    def __init__(self, gamma: float | int, lam: float | int, whiten_advantages: bool = True) -> None:
        for name, value in {"gamma": gamma, "lam": lam}.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value} is no discount; give a number between 0 and 1")
        self.gamma = gamma
        self.lam = lam
        self.whiten_advantages = whiten_advantages

    def compute(self, experience: Experience) -> Advantages:
        """Advantage and return of each action, from r_t = −β·KL_t, and the total reward at the last action.

        Rewards are placed as in arXiv:1909.08593, advantages and returns are those of `gae` and `returns`.

        Args:
            experience: with the critic's values before its first update, in the unit of the reward.

        Returns:
            Advantages and returns [batch, seq], 0 outside the actions, in the unit of the reward; whitened
            advantages in standard deviations. Units [batch, 1], every row by itself.
        """
        rollout, values = experience.rollout, experience.values
        assert values is not None
        response_mask = rollout.response_mask
        rewards = token_rewards(experience.rewards.total, response_mask, experience.kl_penalty, 1.0)
        advantages = gae(rewards, values, response_mask, gamma=self.gamma, lam=self.lam)
        is_counted = experience.weights.is_counted
        return Advantages(
            advantages=whiten(advantages, is_counted) if self.whiten_advantages else advantages,
            is_counted=is_counted,
            units=_single_rows(rollout),
            returns=returns(advantages, values, response_mask),
        )


class PairAdvantage(AdvantageEstimator):
    """The best and the worst response to each prompt, as a preference pair: advantage 1 and −1.

    Args:
        judge: compares two completions of a problem, and may ask for the task's `verifier`; None ranks by
            the reward.
        drop_ties: a pair whose sides score the same counts nothing; else its first one is preferred.

    Raises:
        ValueError: `judge` cannot be called.
    """

    needs = ("reference",)
    min_group_size = 2

    def __init__(self, judge: Callable[..., float] | None = None, drop_ties: bool = True) -> None:
        if judge is not None and not callable(judge):
            raise ValueError(f"judge={judge!r} is no function; give it as _target_ with _partial_: true")
        self.judge = judge
        self.drop_ties = drop_ties

    def for_task(self, task: Task) -> "PairAdvantage":
        """The same rule, with the task's verifier for a judge that asks for one.

        Raises:
            ValueError: it asks, and the task has none.
        """
        if self.judge is None or "verifier" not in signature(self.judge).parameters:
            return self
        if not task.is_verifiable:
            raise ValueError(
                f"the judge asks a verifier, and {type(task).__name__} has none; rank by reward=learned"
            )
        return PairAdvantage(partial(self.judge, verifier=task.score), self.drop_ties)

    def judge_all(
        self, problems: Sequence[Problem], completions: Sequence[str], group_size: int
    ) -> Float[Tensor, " batch"] | None:
        if self.judge is None:
            return None
        return tournament(self.judge, problems, completions, group_size)

    def compute(self, experience: Experience) -> Advantages:
        """1 at the actions of each group's best response and −1 at those of its worst; 0 elsewhere.

        Chosen by `best_and_worst` from the judge's verdicts, as in online DPO (arXiv:2402.04792), or where
        there are none from the total reward. A penalty on the KL is not taken off.

        Args:
            experience: rows of whole groups, `group_size` of them side by side.

        Returns:
            Advantages [batch, seq], without unit; units [prompt, 2], the better row before the worse; no
            returns. Rows in no unit are not learned from; a tie that is dropped is in one, uncounted.
        """
        rollout, group_size = experience.rollout, experience.group_size
        verdicts = experience.rewards.total if experience.verdicts is None else experience.verdicts
        best, worst, is_tie = best_and_worst(verdicts.view(-1, group_size))
        first_row = torch.arange(len(best), device=best.device) * group_size
        pairs = torch.stack([first_row + best, first_row + worst], dim=1)
        side = torch.zeros(len(rollout.input_ids), device=best.device)
        is_counted = ~is_tie if self.drop_ties else torch.ones_like(is_tie)
        side[pairs[:, 0]] = is_counted.float()
        side[pairs[:, 1]] = -is_counted.float()
        advantages = group.broadcast_to_response(side, rollout.response_mask)
        return Advantages(advantages, experience.weights.is_counted & (advantages != 0), pairs)
