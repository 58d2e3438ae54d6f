"""The data that flows between the stages: frozen dataclasses of tensors, written once and never into."""

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NEVER = torch.iinfo(torch.int32).max
"""Death time of a key that is never evicted."""

_BatchType = TypeVar("_BatchType", bound="TensorBatch")


@dataclass(frozen=True)
class TensorBatch:
    """A frozen dataclass whose tensors share their first dimension, the batch."""

    def _map_tensors(self: _BatchType, change: Any) -> _BatchType:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self, **{name: change(v) for name, v in values.items() if isinstance(v, Tensor | TensorBatch)}
        )

    def to(self: _BatchType, device: torch.device | str) -> _BatchType:
        """The same batch on another device; Lightning moves a frozen dataclass through this method."""
        return self._map_tensors(lambda value: value.to(device))

    def rows(self: _BatchType, index: Tensor | slice) -> _BatchType:
        """The chosen rows of every tensor, as a new batch; counts and other scalars stay."""
        return self._map_tensors(
            lambda value: value.rows(index) if isinstance(value, TensorBatch) else value[index]
        )


@dataclass(frozen=True)
class Problem:
    """One question of a task: what the model reads, a worked solution to imitate, and the answer scored."""

    prompt: str
    solution: str
    answer: str


@dataclass(frozen=True)
class PromptBatch(TensorBatch):
    """Prompts as the sampler takes them: left-padded, `attention_mask` True on real tokens."""

    token_ids: Int[Tensor, "batch prompt"]
    attention_mask: Bool[Tensor, "batch prompt"]


@dataclass(frozen=True)
class Rollout(TensorBatch):
    """Sampled sequences and the whole record of what the sampler saw while it wrote them.

    Columns are shared by all rows: a prompt is left-padded up to the column where every response starts.
    """

    token_ids: Int[Tensor, "batch seq"]
    is_token: Bool[Tensor, "batch seq"]
    """True on prompt and response tokens, False on padding."""
    is_action: Bool[Tensor, "batch seq"]
    """True on sampled tokens, up to and including the end-of-sequence token."""
    sampler_logps: Float[Tensor, "batch seq"]
    """Log-probability of each action under the very distribution it was sampled from; 0 elsewhere."""
    death: Int[Tensor, "batch layer kv_head seq"]
    """First query column that no longer sees this key; NEVER if it was not evicted, 0 on padding."""
    kv_bytes: int
    """Bytes of keys and values that the cache had allocated for the whole batch."""


@dataclass(frozen=True)
class Rewards:
    """Scores of a batch of completions: their total and the components it is the sum of."""

    total: Float[Tensor, " batch"]
    components: dict[str, Float[Tensor, " batch"]]


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with a right and a wrong completion."""

    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class TrainBatch(TensorBatch):
    """What one forward of the learner needs: a rollout with credit assigned and every denominator settled.

    `loss_weight` already contains the counts of the whole optimizer step, so a loss is a plain weighted sum
    and no split into micro-batches or ranks can change it.
    """

    rollout: Rollout
    advantages: Float[Tensor, "batch seq"]
    old_logps: Float[Tensor, "batch seq"]
    """Log-probs under the learner's own view before its first update on this rollout."""
    ref_logps: Float[Tensor, "batch seq"]
    """The reference's log-probs under the learner's view; zeros where no KL is wanted."""
    correction: Float[Tensor, "batch seq"]
    """Detached off-policy weight of each action."""
    loss_weight: Float[Tensor, "batch seq"]
    """Share of each action in the losses of its optimizer step; 0 where it does not count."""
    n_actions: int
    """Actions in the whole optimizer step, the denominator of per-token metrics."""
    is_fresh: bool
    """True before the first update on this rollout, when replay must equal sampling."""
    ends_step: bool
    """True for the last micro-batch of an optimizer step."""


@dataclass(frozen=True)
class EvalRow:
    """What a model scores on held-out prompts with one cache."""

    cache: str
    """What a reader calls it: "dense", or policy and size."""
    budget: int | None
    """Keys kept per sequence, layer and KV head; None keeps all."""
    accuracy: float
    n_problems: int
    mean_length: float
    """Tokens per response."""
    kv_bytes: int
    """Allocated cache bytes of the whole batch."""
    kl: float
    """KL(μ ‖ dense learner) per token in nats, estimated on sampled tokens: the mismatch of compression."""
    replay_gap: float
    """max |log π(shadow) − log μ| over all actions: 0 but for float error, or replay is broken."""
