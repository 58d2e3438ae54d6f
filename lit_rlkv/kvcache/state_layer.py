"""Layers that keep a state beside or in place of keys: convolutions and recurrences, row by row."""

import weakref
from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor
from transformers import cache_utils

from lit_rlkv.kvcache.feed import Feed
from lit_rlkv.kvcache.layer import SlotLayer
from lit_rlkv.kvcache.layer_kind import LayerKind
from lit_rlkv.kvcache.window_layer import WindowLayer

if TYPE_CHECKING:
    from lit_rlkv.kvcache.cache import SlotCache

LINEAR: type[Any] = getattr(cache_utils, "LinearAttentionLayer", object)
"""transformers' layer of states; older versions have none, and models with such layers are refused."""
STATES = ("conv_states", "recurrent_states")


class StateLayer(LINEAR):  # type: ignore[misc]
    """The states of a recurrent layer, as transformers' own cache layer has them, for all rows of a cache.

    A feed computes the states of its rows apart and copies them to all rows that take its tokens. Decoding
    updates all rows in place; those of a finished row are arbitrary until it is filled again. Nothing is
    evicted, since a state has a fixed size.
    """

    def __init__(self, cache: "SlotCache", kind: LayerKind) -> None:
        super().__init__(number_of_states=kind.n_states)
        self.cache: SlotCache = weakref.proxy(cache)
        self._aside: dict[str, dict[int, Tensor | None]] = {}

    def begin_feed(self, feed: Feed) -> None:
        """Put the states of all rows aside, and go on from those of the rows that are fed."""
        is_begun = feed.most_held > 0
        numbers = range(self.number_of_states)
        for name in STATES:
            self._aside[name] = pools = getattr(self, name)
            states = {number: self._before(feed, pools[number]) if is_begun else None for number in numbers}
            setattr(self, name, states)
            is_known = {number: state is not None for number, state in states.items()}
            setattr(self, f"is_{name}_initialized", is_known)
        self.has_previous_state = dict.fromkeys(numbers, is_begun)

    @staticmethod
    def _before(feed: Feed, pool: Tensor | None) -> Tensor | None:
        """Return the states that the rows have, 0 where a sequence begins."""
        if pool is None:
            return None
        is_begin = (feed.n_held == 0).view(-1, *[1] * (pool.ndim - 1))
        return pool[feed.sources].masked_fill(is_begin, 0.0)

    def end_feed(self, feed: Feed) -> None:
        """Copy the states of each row to all that take the same tokens."""
        for name in STATES:
            pools = self._aside.pop(name)
            for number, state in getattr(self, name).items():
                if state is None:
                    continue
                pool = pools[number]
                if pool is None:
                    pool = pools[number] = state.new_zeros(self.cache.n_rows, *state.shape[1:])
                for sample in range(feed.n_samples):
                    pool[feed.rows_of(sample)] = state
            setattr(self, name, pools)

    def resize(self, rows: Int[Tensor, " kept"]) -> None:
        """Keep the states of these rows."""
        for name in STATES:
            pools = getattr(self, name)
            setattr(self, name, {number: None if s is None else s[rows] for number, s in pools.items()})

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all rows; 0 before the first feed."""
        pools = (pool for name in STATES for pool in getattr(self, name).values())
        return sum(pool.nbytes for pool in pools if pool is not None)


class HybridLayer(SlotLayer, StateLayer):
    """A layer with attention and a state side by side."""

    def __init__(self, cache: "SlotCache", kind: LayerKind) -> None:
        super().__init__(cache, kind)
        StateLayer.__init__(self, cache, kind)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the states that a keyword names; a feed allocates the pool of slots."""
        if kwargs:
            StateLayer.lazy_initialization(self, **kwargs)

    def resize(self, rows: Int[Tensor, " kept"]) -> None:
        super().resize(rows)
        StateLayer.resize(self, rows)


class HybridWindowLayer(HybridLayer, WindowLayer):
    """A layer with a state beside an attention whose window is shorter than the sequences."""
