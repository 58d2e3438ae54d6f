"""Experience: the rollout of one iteration with its log-probs, rewards, values and importance weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rlkv.distributed.ranks import SINGLE_PROCESS, Ranks
from lit_rlkv.objectives.corrections import ISWeights
from lit_rlkv.types import Problem, Rewards, Rollout, TensorBatch


@dataclass(frozen=True)
class Experience(TensorBatch):
    """The rollout of one iteration with its scores and rewards; read-only."""

    iteration: int
    problems: Sequence[Problem]
    completions: Sequence[str]
    """Text of the last turn of each response."""
    rollout: Rollout
    rewards: Rewards
    has_eos: Bool[Tensor, " batch"]
    """False where the response was truncated at max_new_tokens, in a turn or before an observation."""
    old_logps: Float[Tensor, "batch seq"]
    """Log-probs of π_old: the policy under the learner's view, or the sampler in bypass mode."""
    ref_logps: Float[Tensor, "batch seq"] | None
    """Log-probs of the reference; None without one."""
    kl_coef: float | int
    """KL coefficient β of this iteration."""
    kl_penalty: Float[Tensor, "batch seq"]
    """β·KL of each response token if the KL is part of the reward; else 0."""
    values: Float[Tensor, "batch seq"] | None
    """Values of the critic; None without one."""
    weights: ISWeights
    group_size: int
    kl_estimator: str | None = None
    """Estimator of the KL in the reward; None if the reward contains none."""
    gamma: float | int = 1.0
    """Discount per response token, used for the returns that a critic learns."""
    is_replayed: bool = False
    """True if `old_logps` were scored under replay: they differ from the sampler's by rounding only."""
    entropy: Float[Tensor, "batch seq"] | None = None
    """Entropy of the policy at each response token before the update, in nats; None if nothing needs it."""
    transcripts: Sequence[str] = ()
    """Text of whole responses, with the observations of their environments; empty without environments."""
    budget: int | None = None
    """Budget of the rollout's cache if it is steered by the overlap; None otherwise."""
    n_rounds: int | None = None
    """Rounds that were sampled to replace groups of equal rewards; None if none are replaced."""
    curriculum: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the curriculum after the rollout; empty without one."""
    n_decisions: Int[Tensor, " batch"] | None = None
    """Evictions of each row, counted by KV head and compaction; None if they are not learned from."""
    greedy_rewards: Float[Tensor, " batch"] | None = None
    """Reward of a greedy response to the prompt of each row; None if nothing needs it."""
    seed: int = 0
    """Seed of the run."""
    ranks: Ranks = SINGLE_PROCESS
    """The processes that share an iteration; each has its own rows."""

    def all_gather(self) -> "Experience":
        """Return the rows of all ranks, without texts and records of replay; every rank must call it."""
        return self if self.ranks.size == 1 else self._gathered

    @cached_property
    def _gathered(self) -> "Experience":
        light = replace(
            self,
            problems=(),
            completions=(),
            transcripts=(),
            rollout=self.rollout.without_records(),
            ranks=SINGLE_PROCESS,
        ).map_tensors(self.ranks.all_gather)
        kv_bytes = sum(self.ranks.all_gather_object([self.rollout.kv_bytes]))
        return replace(light, rollout=replace(light.rollout, kv_bytes=kv_bytes))
