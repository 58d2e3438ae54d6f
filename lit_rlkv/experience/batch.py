"""Experience: one iteration's rollout with everything that is known about it before the updates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxtyping import Bool, Float
from torch import Tensor

from lit_rlkv.distributed.ranks import SINGLE_PROCESS, Ranks
from lit_rlkv.objectives.corrections import ISWeights
from lit_rlkv.types import Problem, Rewards, Rollout


@dataclass(frozen=True)
class Experience:
    """One iteration's rollout with everything that was found out about it, for callbacks to look at."""

    iteration: int
    problems: Sequence[Problem]
    completions: Sequence[str]
    rollout: Rollout
    rewards: Rewards
    has_eos: Bool[Tensor, " batch"]
    """False where the response was cut off at the longest length allowed."""
    old_logps: Float[Tensor, "batch seq"]
    ref_logps: Float[Tensor, "batch seq"] | None
    """None where no reference is wanted."""
    kl_coef: float | int
    """β of this iteration."""
    kl_penalty: Float[Tensor, "batch seq"]
    """β·KL of each action, where the reward pays for it; else 0."""
    values: Float[Tensor, "batch seq"] | None
    """None without a critic."""
    weights: ISWeights
    group_size: int
    kl_estimator: str | None = None
    """Of the KL that the reward pays for; None where it pays for none."""
    verdicts: Float[Tensor, " batch"] | None = None
    """What the credit rule's judge makes of the responses; None where none is asked."""
    gamma: float | int = 1.0
    """Discount of a reward for each action that it is away, which a critic learns returns with."""
    ranks: Ranks = SINGLE_PROCESS
    """Each of which has rows of its own."""

    def all_gather(self) -> "Experience":
        """The rows of all ranks, without texts and eviction tables; all ranks must ask for it together."""
        return self if self.ranks.size == 1 else self._gathered

    @cached_property
    def _gathered(self) -> "Experience":
        gather = self.ranks.gather
        weights = self.weights
        return replace(
            self,
            problems=(),
            completions=(),
            rollout=of_all_ranks(self.rollout, self.ranks),
            rewards=self.rewards.map_tensors(gather),
            has_eos=gather(self.has_eos),
            old_logps=gather(self.old_logps),
            ref_logps=_each(gather, self.ref_logps),
            kl_penalty=gather(self.kl_penalty),
            values=_each(gather, self.values),
            weights=ISWeights(gather(weights.weight), gather(weights.is_counted)),
            verdicts=_each(gather, self.verdicts),
            ranks=SINGLE_PROCESS,
        )


def _each(change: Callable[[Tensor], Tensor], values: Tensor | None) -> Tensor | None:
    return None if values is None else change(values)


def of_all_ranks(rollout: Rollout, ranks: Ranks) -> Rollout:
    """The rows of every rank, without their eviction tables, which only a learner of the rows needs.

    A eviction table is as large as layers × heads of all else together. `kv_bytes` are those of all caches.
    """
    light = replace(rollout, evicted_at=rollout.evicted_at[:, :0, :0])
    return replace(light.map_tensors(ranks.gather), kv_bytes=sum(ranks.gather_list([rollout.kv_bytes])))
