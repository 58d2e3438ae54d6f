"""The data that flows between the stages: frozen dataclasses of tensors, written once and never into."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NEVER = torch.iinfo(torch.int32).max
"""Eviction time of a key that is never evicted."""

_BatchType = TypeVar("_BatchType", bound="TensorBatch")


@dataclass(frozen=True)
class TensorBatch:
    """A frozen dataclass whose tensors share their first dimension, the batch."""

    def map_tensors(self: _BatchType, change: Any) -> _BatchType:
        """The same with every tensor changed, those by name in a mapping too; all else stays."""

        def changed(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: changed(part) for name, part in value.items()}
            return change(value) if isinstance(value, Tensor | TensorBatch) else value

        return replace(self, **{f.name: changed(getattr(self, f.name)) for f in fields(self)})

    def to(self: _BatchType, device: torch.device | str) -> _BatchType:
        """The same batch on another device; Lightning moves a frozen dataclass through this method."""
        return self.map_tensors(lambda value: value.to(device))

    def rows(self: _BatchType, index: Tensor | slice) -> _BatchType:
        """The chosen rows of every tensor, as a new batch; counts and other scalars stay."""
        return self.map_tensors(
            lambda value: value.rows(index) if isinstance(value, TensorBatch) else value[index]
        )


@dataclass(frozen=True)
class Message:
    """One turn of a chat; `role` is system, user or assistant."""

    role: str
    content: str


Prompt = str | tuple[Message, ...]
"""A prompt: a text, or the messages of a chat."""


def prompt_text(prompt: Prompt) -> str:
    """A prompt as people read it: a chat is one `role: content` after the other. Models read a template's."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.role}: {message.content}" for message in prompt)


@dataclass(frozen=True)
class Problem:
    """One question of a task: what the model reads, a worked solution to imitate, and the answer scored."""

    prompt: Prompt
    solution: str
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """More that a reward function may ask for, as JSON can hold it."""


@dataclass(frozen=True)
class PromptBatch(TensorBatch):
    """Prompts as the sampler takes them: left-padded, `attention_mask` True on real tokens."""

    input_ids: Int[Tensor, "batch prompt"]
    attention_mask: Bool[Tensor, "batch prompt"]


@dataclass(frozen=True)
class Rollout(TensorBatch):
    """Sampled sequences and the whole record of what the sampler saw while it wrote them.

    Columns are shared by all rows: a prompt is left-padded up to the column where every response starts.
    """

    input_ids: Int[Tensor, "batch seq"]
    attention_mask: Bool[Tensor, "batch seq"]
    """True on prompt and response tokens, False on padding."""
    response_mask: Bool[Tensor, "batch seq"]
    """True on sampled tokens, up to and including the end-of-sequence token."""
    rollout_logps: Float[Tensor, "batch seq"]
    """Log-probability of each action under the very distribution it was sampled from; 0 elsewhere."""
    evicted_at: Int[Tensor, "batch layer kv_head seq"]
    """First query column that no longer sees this key; NEVER if it was not evicted, 0 on padding."""
    kv_bytes: int
    """Bytes of keys and values that the cache had allocated for the whole batch."""


@dataclass(frozen=True)
class Rewards(TensorBatch):
    """Scores of a batch of completions: what is learned from, and the components that it is made of."""

    total: Float[Tensor, " batch"]
    """Weighed, normalised, clipped, less the penalty of what was cut."""
    components: dict[str, Float[Tensor, " batch"]]
    """NaN where a reward function failed."""
    is_failed: Bool[Tensor, " batch"] | None = None
    """Responses without a reward, whose total is their group's mean of the others; None: nothing can fail."""
    weighed: Float[Tensor, " batch"] | None = None
    """Sum of the components by their weights, filled in like the total; None: the total is nothing else."""

    @property
    def scores(self) -> Float[Tensor, " batch"]:
        """In the units of the components, so that iterations and runs can be compared."""
        return self.total if self.weighed is None else self.weighed


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with a better and a worse completion."""

    prompt: Prompt
    chosen: str
    rejected: str


@dataclass(frozen=True)
class TrainBatch(TensorBatch):
    """Input of one training step: a rollout with advantages and every denominator of its loss.

    `loss_weight` already contains the counts of the whole optimizer step, so a loss is a plain weighted sum
    and no split into micro-batches or ranks can change it.
    """

    rollout: Rollout
    advantages: Float[Tensor, "batch seq"]
    old_logps: Float[Tensor, "batch seq"]
    """Log-probs under the learner's own view before its first update on this rollout."""
    ref_logps: Float[Tensor, "batch seq"]
    """The reference's log-probs under the learner's view; zeros where none are wanted."""
    correction: Float[Tensor, "batch seq"]
    """Detached off-policy weight of each action."""
    loss_weight: Float[Tensor, "batch seq"]
    """Share of each action in the policy's loss of its optimizer step; 0 where it does not count."""
    kl_coef: float | int
    """Coefficient of the KL loss in this iteration."""
    n_response_tokens: int
    """Actions in the whole optimizer step, the denominator of per-token metrics and of the value loss."""
    is_first_update: bool
    """True before the first update on this rollout, when replay must equal sampling."""
    ends_step: bool
    """True for the last micro-batch of an optimizer step."""
    learners: tuple[str, ...] = ("policy",)
    """The roles that learn from this micro-batch; one at a time keeps the activations of one only."""
    old_values: Float[Tensor, "batch seq"] | None = None
    """The critic's values before its first update on this rollout; None without a critic."""
    returns: Float[Tensor, "batch seq"] | None = None
    """Targets of the critic; None without a critic."""
    n_pairs: int = 0
    """Preference pairs in the whole optimizer step; rows 2i and 2i + 1 are then better and worse."""


@dataclass(frozen=True)
class EvalRow:
    """Scores of a policy on held-out prompts with one cache."""

    cache: str
    """Name of the cache: "dense", or policy and size."""
    budget: int | None
    """Keys kept per sequence, layer and KV head; None keeps all."""
    accuracy: float
    n_problems: int
    mean_length: float
    """Tokens per response."""
    kv_bytes: int
    """Allocated bytes of keys and values, of the whole batch.

    The latest queries that SnapKV, R-KV and expected attention hold beside them are not counted:
    window · group / (2 · slots) of it, where `group` query heads share a KV head.
    """
    kl: float
    """KL(μ ‖ dense learner) per token in nats, estimated on sampled tokens: the mismatch of compression."""
    replay_gap: float
    """max |log π(shadow) − log μ| over all actions: 0 but for float error, or replay is broken."""
    learned_reward: float | None = None
    """Mean score of the reward role; None where the run has none."""
