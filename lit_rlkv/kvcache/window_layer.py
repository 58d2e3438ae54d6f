"""WindowLayer: a layer with a window, whose keys stand in a ring and are never scored."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lit_rlkv.kernels.evict import take_slots
from lit_rlkv.kernels.shadow_attention import shadow_attention
from lit_rlkv.kvcache.feed import Feed
from lit_rlkv.kvcache.feed_attention import feed_attention
from lit_rlkv.kvcache.layer import UNUSED, SlotLayer
from lit_rlkv.kvcache.layer_kind import LayerKind
from lit_rlkv.kvcache.slots import Slots

if TYPE_CHECKING:
    from lit_rlkv.kvcache.cache import SlotCache


class WindowLayer(SlotLayer):
    """Pool of a layer whose queries see the latest `window` keys: a ring, in which the order does not matter.

    The key of position p is in slot p % window until the key of position p + window takes its place. So it
    dies at column p + window without a record, and no policy can evict it: the memory is bounded already.
    A layer with chunks reads the slots that the present chunk has written.
    """

    def __init__(self, cache: "SlotCache", kind: LayerKind) -> None:
        super().__init__(cache, kind)
        assert kind.window is not None
        self.window = kind.window

    def _feed(self, query: Tensor, key: Slots, value: Slots, scaling: float, softcap: float | None) -> Tensor:
        """Attend within the window over the ring and the given tokens, then write the last `window` keys."""
        feed = self._begin_feed()
        if self.pools is None:
            n_rows = self.cache.n_rows
            self.pools = key.pool(n_rows, self.window), value.pool(n_rows, self.window)
            self._number_slots()
            self.is_initialized = True
        rings = [pool.map(lambda part: part[feed.sources]) for pool in self._pools()]
        if feed.most_held == 0:
            # In columns of these tokens, which need not be the first of a sequence.
            expiry = self.kind.expiry(feed.columns, feed.first[:, None]) - feed.columns[:, :1]
            evicted_at = expiry.where(feed.is_token, 0)[:, None].int()
            seen = (key.read(), value.read())
            out = shadow_attention(query, *seen, evicted_at, scaling, softcap=softcap, sink=self.sink)
        else:
            seen = (
                torch.cat([rings[0].read(), key.read()], dim=2),
                torch.cat([rings[1].read(), value.read()], dim=2),
            )
            is_seen = partial(self._is_seen, feed)
            out = feed_attention(query, *seen, is_seen, scaling, softcap, self.sink)
        index, is_new = feed.ring_places(feed.newest - feed.first, self.window)
        index = index[:, None].expand(-1, key.shape[1], -1)

        def latest(new: Tensor, ring: Tensor) -> Tensor:
            return torch.where(is_new[:, None, :, None], take_slots(new, index), ring)

        for pool, ring, new in zip(self._pools(), rings, (key, value), strict=True):
            kept = new.map(latest, ring)
            for sample in range(feed.n_samples):
                pool.put(feed.rows_of(sample), kept)
        return out

    def _is_seen(self, feed: Feed, tokens: Int[Tensor, " query"]) -> Bool[Tensor, "batch query candidate"]:
        """Return True where one of these given tokens sees a slot of the ring before, or a given token."""
        first, query_columns = feed.first[:, None], feed.columns[:, tokens, None]
        last = (feed.newest - feed.n_new)[:, None] - first
        slot = torch.arange(self.window, device=first.device)
        held = first + last - (last - slot) % self.window
        columns = torch.cat([held.where(held >= first, UNUSED), feed.columns.where(feed.is_token, UNUSED)], 1)
        is_alive = query_columns < self.kind.expiry(columns, first)[:, None]
        return (columns >= first)[:, None] & (columns[:, None] <= query_columns) & is_alive

    def begin(self, rows: Int[Tensor, " row"]) -> None:
        """Do nothing; a ring has no record of evictions."""

    def _decode(
        self, query: Tensor, key: Slots, value: Slots, scaling: float, softcap: float | None
    ) -> Tensor:
        """Write one key per row over the oldest one, and attend to the ring."""
        cache = self.cache
        n_tokens = cache.column - cache.first + 1
        slot = (n_tokens - 1) % self.window
        self._write(slot, key, value)
        n_read = None if cache.n_read is None else min(cache.levels.longest + 1, self.window)
        packed = query.reshape(*key.shape[:2], -1, query.shape[-1])
        n_live = slot + 1 if self.kind.in_chunks else n_tokens.clamp(max=self.window)
        out = self._attend_to_slots(packed, n_read, n_live, scaling, softcap)
        return out.reshape(len(packed), -1, 1, out.shape[-1])

    def compact(self, is_due: Bool[Tensor, " row"]) -> None:
        """Do nothing; a ring never holds too many keys."""

    def resize(self, rows: Int[Tensor, " kept"]) -> None:
        """Keep these rows; the ring stays as it is."""
        keys, values = (pool.map(lambda part: part[rows]) for pool in self._pools())
        self.pools = keys, values
        if self.codes is not None:
            self.codes.keep(rows)
        self._number_slots()

    def table(self, rows: Int[Tensor, " row"]) -> Int[Tensor, "row kv_head seq"]:
        column = torch.arange(self.cache.seq_len, device=rows.device)
        expiry = self.kind.expiry(column, self.cache.first[rows, None]).int()
        return expiry[..., None, :].expand(len(rows), self.n_kv_heads, -1)
