"""The interface of eviction policies: what they see of a layer's keys, and what they return."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lit_rlkv.kvcache.scorer import KVShape
from lit_rlkv.kvcache.slots import Slots
from lit_rlkv.kvcache.value_norms import Projection, projected_norms


@dataclass(frozen=True)
class SlotView:
    """The input of a policy: the keys that compete for a budget, in the order of their columns."""

    key_slots: Slots
    value_slots: Slots
    columns: Int[Tensor, "batch kv_head slot"]
    """Position of each key in the sequence, padding included; -1 in a slot without a key."""
    is_live: Bool[Tensor, "batch kv_head slot"]
    """False on padding and in slots without a key, which are never kept, whatever their score."""
    is_recent: Bool[Tensor, "batch kv_head slot"]
    """True in the window of the latest keys, which are kept whatever their score."""
    is_first: Bool[Tensor, "batch kv_head slot"]
    """True on the sinks, and on a prompt that is protected, which are kept whatever their score."""
    budget: int
    """Keys that stay, beside those of a protected prompt."""
    queries: Float[Tensor, "batch kv_head group window dim"] | None
    """The latest queries, in any order, grouped by KV head; None unless the policy sets `sees_queries`."""
    query_columns: Int[Tensor, "batch window"] | None
    """Position of each query in the sequence, padding included."""
    attention: Float[Tensor, "batch kv_head slot"] | None
    """Attention that each key received, mean over the query group, or what `Policy.renew` returned for it;
    None without `tracks_attention`."""
    scaling: float
    """Factor of q·k in the attention logits."""
    generator: torch.Generator | None
    """For policies that draw; None is torch's default generator."""
    is_due: Bool[Tensor, " batch"] | None = None
    """Rows whose scores will be read; None means all. Other rows may score anything."""
    now: Int[Tensor, " batch"] | None = None
    """First column whose query will not see the evicted keys: that of the latest query + 1."""
    scorer: Callable[..., Tensor] | None = None
    """This layer's part of what `Policy.make_scorer` has made; None without one."""
    frequencies: Float[Tensor, " pair"] | None = None
    """Radians by which RoPE rotates the pairs of numbers d and d + n_pairs per column; None unless the policy
    sets `reads_rope`."""
    layer: int = 0
    """Number of this layer among those with attention."""
    first: Int[Tensor, " batch"] | None = None
    """Column of the first token of each row, that is, its padding."""
    projection: Projection | None = None
    """This layer's W_o; None unless the policy sets `reads_projection`."""

    @cached_property
    def keys(self) -> Float[Tensor, "batch kv_head slot dim"]:
        """The keys: the pool itself, or a copy of what its codes stand for, made once it is read."""
        return self.key_slots.read()

    @cached_property
    def values(self) -> Float[Tensor, "batch kv_head slot dim_v"]:
        """The values, likewise."""
        return self.value_slots.read()

    @cached_property
    def value_norms(self) -> Float[Tensor, "batch kv_head slot"]:
        """‖W_o v‖₁ of each value, mean over the query group; needs `Policy.reads_projection`."""
        assert self.projection is not None
        return projected_norms(self.values, self.projection())


class Policy(ABC):
    """Interface of an eviction policy: it scores keys, and the cache does the rest.

    `score` is called for each layer when sequences above the budget are compacted. In each KV head the cache
    keeps the sink tokens, the window of latest tokens, then the keys of highest score, up to the budget. It
    moves them to the front of the pool and records when the others were evicted, so that the learner can
    replay it. A policy object has no state: everything it may use is in the `SlotView`.

        class LargestValues(Policy):
            def score(self, view):
                return view.values.float().norm(dim=-1)
    """

    tracks_attention: ClassVar[Literal["sum", "last", "renewed"] | None] = None
    """Attention that the cache collects in `SlotView.attention`: "sum" over all queries since the key was
    written, "last" query only, or None. "renewed": what `renew` returns, before each call of `score`."""
    sees_queries: ClassVar[bool] = False
    """True if the cache keeps the latest `window` queries for `SlotView.queries`."""
    reads_rope: ClassVar[bool] = False
    """True if `SlotView.frequencies` is needed; models without RoPE in halves are then refused."""
    reads_projection: bool = False
    """True if `SlotView.value_norms` is needed; models without `o_proj`, or sharded, are then refused."""
    draws: bool = False
    """True if scores are random, so that the responses to one prompt must not share them.

    They do share those of all chunks of a prompt but the last, which are read, and drawn, once."""
    is_trained: ClassVar[bool] = False
    """True if `SlotView.scorer` is needed, which RL trains.

    The constructor must take `samples: bool` and set `draws` to it. With it `score` must add independent
    standard Gumbel noise to what the scorer returns, and nothing else, as `Learned` does: the learner takes
    the survivors for a Gumbel top-k draw by the scorer."""

    @abstractmethod
    def score(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        """Return float scores; the highest are kept, and of equal scores the earlier key."""

    def renew(self, view: SlotView) -> Float[Tensor, "batch kv_head slot"]:
        """Return a number of each key from `view.attention`, which holds the last one; 0 for a new key."""
        raise NotImplementedError(f'{type(self).__name__}.renew is needed for tracks_attention = "renewed"')

    def make_scorer(self, shapes: Sequence[KVShape]) -> nn.Module:
        """Return a module whose `layer(number)` is, for each layer of `shapes`, like a `LayerScorer`."""
        raise NotImplementedError(f"{type(self).__name__}.make_scorer is needed for is_trained = True")
