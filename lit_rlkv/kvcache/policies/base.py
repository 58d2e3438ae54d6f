"""Interface of an eviction policy."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class SlotView:
    """The input of a policy: the keys that compete for a budget, in the order of their columns."""

    keys: Float[Tensor, "batch kv_head slot dim"]
    values: Float[Tensor, "batch kv_head slot dim_v"]
    columns: Int[Tensor, "batch kv_head slot"]
    """Position of each key in the sequence, padding included."""
    is_live: Bool[Tensor, "batch kv_head slot"]
    """False on padding, which is never kept, whatever its score."""
    is_recent: Bool[Tensor, "batch kv_head slot"]
    """True in the window of the latest keys, which are kept whatever their score."""
    queries: Float[Tensor, "batch kv_head group window dim"] | None
    """The latest queries, in any order, grouped by KV head; None unless the policy sets `sees_queries`."""
    query_columns: Int[Tensor, "batch window"] | None
    """Position of each query in the sequence, padding included."""
    attention: Float[Tensor, "batch kv_head slot"] | None
    """Attention that each key received, mean over the query group; None without `tracks_attention`."""
    scaling: float
    """Factor of q·k in the attention logits."""
    generator: torch.Generator | None
    """For policies that draw; None is torch's default generator."""
    is_due: Bool[Tensor, " batch"] | None = None
    """Rows whose scores will be read; None means all. Other rows may score anything."""


class Policy(ABC):
    """Interface of an eviction policy: it scores keys, and the cache does the rest.

    Whenever all slots of a sequence are full, `score` is called for each layer. In each KV head the cache
    keeps the sink tokens, the window of latest tokens, then the keys of highest score, up to the budget. It
    moves them to the front of the pool and records when the others were evicted, so that the learner can
    replay it. A policy has no state: everything it may use is in the `SlotView`.

        class LargestValues(Policy):
            def score(self, view):
                return view.values.float().norm(dim=-1)
    """

    tracks_attention: ClassVar[Literal["sum", "last"] | None] = None
    """Attention that the cache collects in `SlotView.attention`: "sum" over all queries since the key was
    written, "last" query only, or None."""
    sees_queries: ClassVar[bool] = False
    """True if the cache keeps the latest `window` queries for `SlotView.queries`."""
    draws: ClassVar[bool] = False
    """True if scores are random, so that the responses to one prompt must not share them."""

    @abstractmethod
    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        """Return float scores; the highest are kept, and of equal scores the earlier key."""
