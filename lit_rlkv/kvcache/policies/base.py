"""What an eviction policy is shown, and the one question it answers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class SlotView:
    """The keys that compete for a budget, ordered by column, and the evidence to judge them by."""

    keys: Float[Tensor, "batch kv_head slot dim"]
    values: Float[Tensor, "batch kv_head slot dim_v"]
    columns: Int[Tensor, "batch kv_head slot"]
    """Column of the sequence that each key came from."""
    is_live: Bool[Tensor, "batch kv_head slot"]
    """False on padding, which scores whatever it likes and is never kept."""
    is_recent: Bool[Tensor, "batch kv_head slot"]
    """The protected window: kept whatever its score."""
    queries: Float[Tensor, "batch kv_head group window dim"] | None
    """The latest queries, in any order, grouped by the KV head they read; None unless the policy asks."""
    query_columns: Int[Tensor, "batch window"] | None
    """Column of the sequence that each query came from."""
    attention: Float[Tensor, "batch kv_head slot"] | None
    """Attention received, mean over the query group; None unless the policy asks for it."""
    scaling: float
    generator: torch.Generator | None
    is_due: Bool[Tensor, " batch"] | None = None
    """Rows whose scores will be read; None: all."""


class Policy(ABC):
    """Scores keys; the cache keeps the highest, protects sinks and window, and records the evictions."""

    tracks_attention: ClassVar[Literal["sum", "last"] | None] = None
    """Which attention the cache collects: summed over all queries since birth, or of the last query alone."""
    sees_queries: ClassVar[bool] = False
    """True if the policy reads the latest queries."""
    draws: ClassVar[bool] = False
    """Whether scores are drawn, so that the samples of one prompt do not share them."""

    @abstractmethod
    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        """Higher is kept. Ties go to the earlier key."""
