"""The reward of each response: weighted components, normalised, clipped, with a penalty for truncation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rlkv.checks import OneLineError
from lit_rlkv.config.schema import RewardConfig
from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.environments.conversations import TextConversations
from lit_rlkv.experience.gae import STD_FLOOR, whiten
from lit_rlkv.objectives.reduction import masked_mean
from lit_rlkv.rewards import RewardFunction
from lit_rlkv.rewards.manager import PendingRewards
from lit_rlkv.rewards.verifier import EXACT_MATCH, MAX_SCORE, bounded, score
from lit_rlkv.tasks.base import Task
from lit_rlkv.types import Rewards

ENVIRONMENT = "environment"
"""Component of the reward that holds the sum of an environment's rewards."""
OWN = {EXACT_MATCH: "verifier", "learned": "learned", ENVIRONMENT: "environment"}
"""Components that are not reward functions, and the options that hold their weights."""


def accuracy_component(
    config: RewardConfig, functions: Mapping[str, RewardFunction], task: Task
) -> str | None:
    """Return the component of the reward that gives right answers full score; None if nothing says which."""
    if config.accuracy is not None:
        return config.accuracy
    if config.environment != 0 and config.verifier == 0:
        return ENVIRONMENT
    if task.is_verifiable:
        return EXACT_MATCH
    rewarded = rewarding(functions)
    return rewarded[0] if len(rewarded) == 1 else None


def rewarding(functions: Mapping[str, RewardFunction]) -> list[str]:
    """Return the names of the functions with a positive weight."""
    return [name for name, function in functions.items() if function.weight > 0]


def check_verifiable(name: str, value: float | int, task: Task) -> None:
    """Check that a task can verify answers, for the key `name`.

    Raises:
        ValueError: it cannot.
    """
    if not task.is_verifiable:
        raise ValueError(
            f"{name}={value}: {type(task).__name__} cannot verify answers, as with preferences, or answers "
            f"without answer_after; use {name}=0, as reward=learned and reward.functions need no verifier"
        )


class RewardsFailedError(OneLineError, RuntimeError):
    """Too few responses have a reward to continue."""


class RewardRule:
    """Computes rewards by a `RewardConfig`; its state is the running moments of all rewards.

    Args:
        functions: reward functions by name, with their weights.
        max_new_tokens: length of the longest response, for `overlong_buffer`.

    Raises:
        ValueError: a number is out of its range, all weights are 0, a name is not allowed, or `accuracy`
            names no function.
    """

    def __init__(
        self,
        config: RewardConfig,
        functions: Mapping[str, RewardFunction] | None = None,
        max_new_tokens: int = 0,
    ) -> None:
        self.config = config
        self.max_new_tokens = max_new_tokens
        self.functions = functions or {}
        self.moments = RunningMoments()
        own = [getattr(config, option) for option in OWN.values()]
        if not any([*own, *(each.weight for each in self.functions.values())]):
            raise ValueError(
                "a reward needs a component with a weight, got verifier=0, learned=0 and environment=0; "
                "raise one, or add functions"
            )
        bad = [name for name in self.functions if not name.isidentifier() or name in OWN]
        if bad:
            raise ValueError(
                f"names of functions must be identifiers other than {', '.join(OWN)}, got {', '.join(bad)}"
            )
        if config.accuracy not in (None, ENVIRONMENT, *self.functions):
            known = ", ".join(self.functions) or "none"
            raise ValueError(
                f"accuracy must name one of the functions ({known}) or be {ENVIRONMENT}, got "
                f"{config.accuracy!r}"
            )

    def check_sources(self, task: Task, has_environment: bool) -> None:
        """Check that there is a verifier and an environment, where the reward needs them.

        Raises:
            ValueError: there is none.
        """
        config = self.config
        if config.verifier != 0:
            check_verifiable("reward.verifier", config.verifier, task)
        if config.environment != 0 and not has_environment:
            raise ValueError(
                f"reward.environment={config.environment} needs an environment; choose one, or use 0"
            )
        if config.accuracy == ENVIRONMENT and not has_environment:
            raise ValueError(f"reward.accuracy={ENVIRONMENT} needs an environment; choose one, or use null")

    def from_completions(
        self,
        task: Task,
        pending: PendingRewards,
        learned: Float[Tensor, " batch"] | None,
        talks: Sequence[TextConversations],
        has_eos: Bool[Tensor, " batch"],
        n_tokens: Int[Tensor, " batch"],
        group_size: int,
        ranks: Ranks,
        on_progress: Callable[[int], object] = lambda n_answers: None,
    ) -> Rewards:
        """Return the rewards of this rank's responses, normalised over those of all ranks.

        Args:
            pending: the responses, with results of the reward functions, which this call waits for.
            learned: scores of the reward role; None without one.
            talks: conversations of all responses; none without environments.
            n_tokens: lengths of the responses, observations included.
            on_progress: called with the number of further answers of reward functions.
        """
        components, errors = scored(task, pending, learned, talks, on_progress)
        errors = dict(ranks.all_gather_object([*errors.items()]))
        gathered = {name: ranks.all_gather(value.to(has_eos.device)) for name, value in components.items()}
        rewards = self(gathered, ranks.all_gather(has_eos), group_size, errors, ranks.all_gather(n_tokens))
        return rewards.rows(ranks.local_rows(len(pending.problems)))

    def __call__(
        self,
        components: Mapping[str, Float[Tensor, " batch"]],
        has_eos: Bool[Tensor, " batch"],
        group_size: int = 1,
        errors: Mapping[str, str] | None = None,
        n_tokens: Int[Tensor, " batch"] | None = None,
    ) -> Rewards:
        """Return the rewards for these components.

        Args:
            components: scores by name; NaN where a score failed. A response without a score, or with a
                weighted sum above MAX_SCORE in size, gets the mean of the rewards of its group, or of all
                responses if its whole group failed.
            group_size: responses to each prompt, side by side.
            errors: messages of failed functions.
            n_tokens: lengths of the responses, for `overlong_buffer`.

        Raises:
            ValueError: a component with a weight is missing.
            RewardsFailedError: more responses failed than `max_failed` allows.
        """
        config, weighted = self.config, self.weighted(components)
        is_failed = weighted.isnan()
        check_failed(is_failed, errors or {}, config.max_failed)
        weighted = weighted.masked_fill(is_failed, 0.0)
        total = weighted.clone()
        if config.normalize == "batch":
            total = whiten(total, ~is_failed)
        elif config.normalize == "running":
            self.moments.update(total[~is_failed])
            total = (total - self.moments.mean) / (self.moments.std + STD_FLOOR)
        if config.clip is not None:
            total = total.clamp(-config.clip, config.clip)
        total = torch.where(has_eos, total, total - config.missing_eos_penalty)
        if config.overlong_buffer is not None and n_tokens is not None:
            share = overlong_share(n_tokens, self.max_new_tokens, config.overlong_buffer)
            total = total - config.overlong_penalty * share
        if is_failed.any():
            total, weighted = (imputed(values, is_failed, group_size) for values in (total, weighted))
        can_fail = bool(self.functions) or ENVIRONMENT in components or bool(is_failed.any())
        failed, weights = is_failed if can_fail else None, self._weights(components)
        return Rewards(total, dict(components), failed, weighted, weights)

    def weighted(self, components: Mapping[str, Float[Tensor, " batch"]]) -> Float[Tensor, " batch"]:
        """Return the weighted sums of the components; NaN for responses without a reward."""
        parts = [weight * components[name] for name, weight in self._weights(components).items()]
        found = bounded(sum(parts[1:], start=parts[0]))
        failed = components.get(ENVIRONMENT, found).isnan()
        return found.masked_fill(failed, float("nan"))

    def _weights(self, components: Mapping[str, Tensor]) -> dict[str, float | int]:
        """Return the non-zero weights by component."""
        weights = {name: getattr(self.config, option) for name, option in OWN.items()}
        for name, option in OWN.items():
            if weights[name] != 0 and name not in components:
                raise ValueError(
                    f"{option}={weights[name]} needs the score {name}, which this run does not have; use 0, "
                    "or a task with a verifier, a reward role or an environment"
                )
        weights |= {name: function.weight for name, function in self.functions.items()}
        return {name: weight for name, weight in weights.items() if weight != 0}

    def state_dict(self) -> dict[str, Any]:
        return self.moments.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.moments.load_state_dict(state_dict)


def scored(
    task: Task,
    pending: PendingRewards,
    learned: Float[Tensor, " batch"] | None = None,
    talks: Sequence[TextConversations] = (),
    on_progress: Callable[[int], object] = lambda n_answers: None,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the components of the rewards, and the errors of those that failed, as `from_completions`."""
    components: dict[str, Tensor] = {}
    if task.is_verifiable:
        components |= score(task.score, pending.problems, pending.in_order()).components
    if learned is not None:
        components["learned"] = bounded(learned)
    answers = pending.collect(on_progress=on_progress)
    components |= answers.scores
    if talks:
        components[ENVIRONMENT] = torch.cat([talk.returns for talk in talks])
    said = [(ENVIRONMENT, error) for talk in talks for error in talk.errors.values()][:1]
    return components, {**answers.errors, **dict(said)}


def overlong_share(
    n_tokens: Int[Tensor, " batch"], max_new_tokens: int, buffer: int
) -> Float[Tensor, " batch"]:
    """Return the soft overlong punishment of DAPO (arXiv:2503.14476), from 0 to 1.

    It is 0 up to `max_new_tokens` − `buffer` tokens, and rises evenly to 1 at `max_new_tokens`.
    """
    return ((n_tokens - (max_new_tokens - buffer)) / buffer).clamp(0.0, 1.0)


def check_failed(
    is_failed: Bool[Tensor, " batch"], errors: Mapping[str, str], max_failed: float | int
) -> None:
    """Check that enough responses have a reward.

    Args:
        errors: messages of failed functions.

    Raises:
        RewardsFailedError: the share of failed responses is above `max_failed`.
    """
    if float(is_failed.float().mean()) > max_failed:
        said = "; ".join(f"{name}: {error}" for name, error in errors.items())
        why = (
            f"reward.functions or the environment failed ({said}); fix these errors, or raise their timeouts"
            if errors
            else f"scores and their weighted sum must be numbers of size at most {MAX_SCORE:g}; scale them"
        )
        raise RewardsFailedError(
            f"{int(is_failed.sum())} of {len(is_failed)} responses have no reward, more than "
            f"reward.max_failed={max_failed} allows, since {why}"
        )


def imputed(
    total: Float[Tensor, " batch"], is_failed: Bool[Tensor, " batch"], group_size: int
) -> Float[Tensor, " batch"]:
    """Replace failed rewards by the mean of their group, so that a group baseline gives them advantage 0.

    If a whole group failed, it gets the mean of all other rewards, or 0.
    """
    groups, is_valid = total.view(-1, group_size), ~is_failed.view(-1, group_size)
    n_valid = is_valid.sum(dim=1)
    # From the least: the rounded mean of equal numbers may be another one, and the group no longer equal.
    least = groups.masked_fill(~is_valid, torch.inf).amin(dim=1)
    above = (groups - least[:, None]).masked_fill(~is_valid, 0.0).sum(dim=1) / n_valid.clamp(min=1)
    mean = torch.where(n_valid > 0, least + above, masked_mean(total, ~is_failed))
    return torch.where(is_valid, groups, mean[:, None]).flatten()


class RunningMoments:
    """Mean and standard deviation of all values so far, independent of the split into batches.

    It uses Python floats, for double precision and a state that JSON can hold.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.m2 = 0.0
        """Σ (value − mean)²."""

    def update(self, values: Float[Tensor, " batch"]) -> None:
        """Merge a batch (Chan, Golub and LeVeque, 'Updating Formulae', 1979).

        Raises:
            ValueError: values are NaN or infinite, which would stay in the moments.
        """
        batch = values.detach().cpu().double()
        if not batch.isfinite().all():
            n_bad = int((~batch.isfinite()).sum())
            raise ValueError(
                f"rewards must be finite, got {n_bad} of {len(batch)} NaN or infinite; fix the function"
            )
        if len(batch) == 0:
            return
        batch_mean = batch.mean().item()
        total = self.count + len(batch)
        difference = batch_mean - self.mean
        self.m2 += (batch - batch_mean).square().sum().item()
        self.m2 += difference**2 * self.count * len(batch) / total
        self.mean += difference * len(batch) / total
        self.count = total

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two values."""
        return (self.m2 / max(self.count - 1, 1)) ** 0.5

    def state_dict(self) -> dict[str, int | float]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state_dict: dict[str, int | float]) -> None:
        self.count = int(state_dict["count"])
        self.mean = float(state_dict["mean"])
        self.m2 = float(state_dict["m2"])
