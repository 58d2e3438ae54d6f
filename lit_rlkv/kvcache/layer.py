"""SlotLayer: one layer of the evicting cache, with its pool of slots and the inputs of its policy."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from lit_rlkv.kernels.backend import to_autocast_dtype
from lit_rlkv.kernels.decode_attention import decode_attention
from lit_rlkv.kernels.evict import choose_survivors, evict, record_evictions, take_slots
from lit_rlkv.kernels.shadow_attention import shadow_attention
from lit_rlkv.kvcache.code_record import CodeRecord
from lit_rlkv.kvcache.feed import Feed
from lit_rlkv.kvcache.feed_attention import feed_attention, received_attention
from lit_rlkv.kvcache.layer_kind import LayerKind
from lit_rlkv.kvcache.policy import SlotView
from lit_rlkv.kvcache.recent_queries import RecentQueries
from lit_rlkv.kvcache.slots import Slots
from lit_rlkv.kvcache.value_norms import Projection
from lit_rlkv.types import NEVER, wide

UNUSED = -1
"""Column of a slot that holds no key."""
FOREIGN_LOOP = (
    "a SlotCache must be decoded by lit_rlkv.generate: the decoding loop of transformers does not fill it; "
    "leave past_key_values out, and pass custom_generate=lit_rlkv.integrations.transformers.generate and "
    "cache=CacheSpec(...) to model.generate"
)

if TYPE_CHECKING:
    from lit_rlkv.kvcache.cache import SlotCache


class SlotLayer(CacheLayerMixin):
    """Pool of one layer. transformers calls `update` with new keys, the attention function calls `attend`."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: "SlotCache", kind: LayerKind) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A strong reference would close a cycle, and the pools would outlive the rollout until the next
        # garbage collection.
        self.cache: SlotCache = weakref.proxy(cache)
        self.kind = kind
        self.number = 0
        """Among the layers with attention."""
        self.group = 0
        """Number of the group of layers whose budget this one has."""
        self.scaling = 1.0
        self.scorer: Callable[..., Tensor] | None = None
        """Scores the keys for a trained policy."""
        self.projection: Projection | None = None
        self.sink: Float[Tensor, "kv_head group"] | None = None
        self.balance: Float[Tensor, "kv_head dim"] | None = None
        """Divisors of the keys before they become codes."""
        self.filled_by: Feed | None = None
        self.pools: tuple[Slots, Slots] | None = None
        """Keys and values of all rows."""
        self.codes = None if cache.spec.dtype is None else CodeRecord(cache.n_rows, cache.seq_len)
        self.evicted_at: Int[Tensor, "row kv_head seq"]
        """Narrow; `table` is wide."""
        self.columns: Int[Tensor, "row kv_head slot"]
        """`UNUSED` in the slots without a key. A dense cache, which never compacts, does not allocate it."""
        self.first_slot: Int[Tensor, "row kv_head"]
        self.recent_queries: RecentQueries | None = None
        self.attention: Float[Tensor, "row kv_head slot"] | None = None

    @property
    def budget(self) -> int:
        """Keys left after a compaction, beside protected prompts."""
        return self.cache.group_budgets[self.group]

    @property
    def limits(self) -> dict[str, int]:
        """Arguments of an eviction that bound what it may keep."""
        spec, prompt_end = self.cache.spec, self.cache.prompt_end
        return {"budget": self.budget, "sink": spec.sink, "window": spec.window, "prompt_end": prompt_end}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing; the first feed allocates the pool."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the states unchanged; `attend` writes them to the pool.

        Raises:
            ValueError: nothing has prefilled the cache, as in a model's own forward.
        """
        if not self.is_initialized and self.cache.incoming is None:
            raise ValueError(FOREIGN_LOOP)
        return key_states, value_states

    @property
    def kv_bytes(self) -> int:
        """Bytes of this layer's pool; 0 before the first prefill.

        `recent_queries` is not counted. It exists for policies that see queries, and is window · group /
        (2 · slots) of the pool, where `group` query heads share a KV head.
        """
        return sum(pool.nbytes for pool in self.pools or ())

    @property
    def n_kv_heads(self) -> int:
        """KV heads of this layer, after the first prefill."""
        return self._pools()[0].shape[1]

    def get_seq_length(self) -> int:
        """Return 0 while sequences begin, and then a number above it.

        The length of each row is known on the device only. Models use this number only to tell prefill from
        decoding, because they are given `position_ids`.
        """
        incoming = self.cache.incoming
        return 0 if self.filled_by is None or (incoming and incoming.most_held == 0) else self.filled_by.width

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Refuse a forward that is not ours, which alone asks for a mask over the cache.

        Raises:
            ValueError: always.
        """
        raise ValueError(FOREIGN_LOOP)

    def attend(
        self,
        query: Float[Tensor, "batch head seq dim"],
        key: Float[Tensor, "batch kv_head seq dim"],
        value: Float[Tensor, "batch kv_head seq dim_v"],
        scaling: float,
        softcap: float | None = None,
        sink: Float[Tensor, " head"] | None = None,
    ) -> Float[Tensor, "batch head seq dim_v"]:
        """Write the new keys, and return the attention of the queries over the cached keys.

        Given tokens attend to all that is cached and to each other, then the keys that fit the budget are
        written. With a quantized cache nothing reads the keys and values as they were before.
        """
        self.scaling = scaling
        self.sink = None if sink is None else sink.view(key.shape[1], -1)
        # Rotated keys are float32; the cache holds them in the dtype that the learner's attention casts to.
        query, key, value = to_autocast_dtype(query, key, value)
        step = self._decode if self.cache.incoming is None else self._feed
        with torch.autocast(query.device.type, enabled=False):
            new_key = Slots.of(key, self.cache.spec.dtype, self.balance)
            new_value = Slots.of(value, self.cache.spec.dtype)
            if self.codes is not None:
                record = torch.cat([new_key.record(), new_value.record()], dim=-1).transpose(1, 2)
                if self.cache.incoming is None:
                    self.codes.write(self.cache.written, record)
                else:
                    self.codes.write_feed(self.cache.incoming, record, new_key.code_group)
            return step(query, new_key, new_value, scaling, softcap)

    def _feed(self, query: Tensor, key: Slots, value: Slots, scaling: float, softcap: float | None) -> Tensor:
        """Attend over the held keys and the given tokens, then keep those that fit the budget of each row."""
        feed, policy = self._begin_feed(), self.cache.policy
        packed = query.reshape(key.shape[0], key.shape[1], -1, *query.shape[2:])
        if self.pools is None:
            self._allocate(packed, key, value)
        columns = feed.columns[:, None].expand(-1, key.shape[1], -1)
        if feed.most_held == 0:
            keys, values = key.read(), value.read()
            evicted_at = torch.where(feed.is_token[:, None], NEVER, 0).int()
            out = shadow_attention(query, keys, values, evicted_at, scaling, softcap=softcap, sink=self.sink)
        else:
            held = [pool.map(lambda part: part[feed.sources, :, : feed.most_held]) for pool in self._pools()]
            key, value = held[0].map(feed.join, key), held[1].map(feed.join, value)
            keys, values = key.read(), value.read()
            out = feed_attention(query, keys, values, feed.is_seen, scaling, softcap, self.sink)
            if policy is not None:
                columns = feed.join(self.columns[feed.sources, :, : feed.most_held], columns)
                columns = columns.masked_fill(~feed.is_candidate[:, None], UNUSED)
        attention = None
        if policy is not None and policy.tracks_attention is not None:
            is_last = policy.tracks_attention == "last"
            if policy.tracks_attention == "renewed":
                attention = torch.zeros(key.shape[:3], device=key.device)
            else:
                attention = received_attention(
                    packed, keys, feed.is_seen, feed.is_token, scaling, softcap, self.sink, last_only=is_last
                )
            if self.attention is not None and feed.most_held > 0 and not is_last:
                held_mass = self.attention[feed.sources, :, : feed.most_held]
                attention += feed.join(held_mass, torch.zeros_like(attention[:, :, feed.most_held :]))
        if self.recent_queries is not None:
            self.recent_queries.write_feed(feed, packed)
        self._fill(feed, key, value, columns, attention)
        return out

    def _begin_feed(self) -> Feed:
        """Return the tokens to fill the pool from.

        Raises:
            ValueError: this layer has filled it from them already.
        """
        feed = self.cache.feeds[self.group]
        if self.filled_by is feed:
            raise ValueError(
                "a layer attends twice in one forward, but the cache has one set of keys per layer; use a "
                "model that attends once per layer"
            )
        self.filled_by = feed
        return feed

    def begin(self, rows: Int[Tensor, " row"]) -> None:
        """Forget the evictions of these rows, whose sequences begin."""
        if self.is_initialized:
            self.evicted_at[rows] = self.cache.table_without_evictions(rows)

    def _allocate(self, packed: Tensor, key: Slots, value: Slots) -> None:
        """Allocate pool and records of all rows."""
        cache, n_kv_heads, n_slots = self.cache, key.shape[1], self.cache.slots[self.group]
        shape = (cache.n_rows, n_kv_heads, n_slots)
        self.pools = key.pool(cache.n_rows, n_slots), value.pool(cache.n_rows, n_slots)
        self.evicted_at = cache.table_without_evictions(slice(None)).repeat(1, n_kv_heads, 1)
        self._number_slots()
        self.is_initialized = True
        if cache.policy is None:
            return
        self.columns = packed.new_full(shape, UNUSED, dtype=torch.long)
        if cache.policy.sees_queries:
            self.recent_queries = RecentQueries(packed, cache.n_rows, cache.spec.window)
        if cache.policy.tracks_attention is not None:
            self.attention = packed.new_zeros(shape, dtype=torch.float32)

    def _number_slots(self) -> None:
        n_rows, n_kv_heads, n_slots = self._pools()[0].shape[:3]
        pools = torch.arange(n_rows * n_kv_heads, device=self._pools()[0].device)
        self.first_slot = pools.view(n_rows, n_kv_heads) * n_slots

    def resize(self, rows: Int[Tensor, " kept"]) -> None:
        """Move these rows to pools of the cache's present sizes; the old ones are freed one by one."""
        keys, values = self._pools()
        if self.codes is not None:
            self.codes.keep(rows)
        self.pools = None
        keys = keys.widened(rows, self.cache.n_slots)
        self.pools = keys, values.widened(rows, self.cache.n_slots)
        self.evicted_at = self.evicted_at[rows]
        self._number_slots()

    def _fill(self, feed: Feed, key: Slots, value: Slots, columns: Tensor, attention: Tensor | None) -> None:
        """Copy the kept candidates to all rows that take the same tokens, and record what was evicted."""
        policy, (keys, values), n_candidates = self.cache.policy, self._pools(), key.shape[2]
        width = min(n_candidates, keys.shape[2])
        if policy is not None:
            width = min(width, self.budget + self.cache.prompt_end)
            self.columns[feed.all_rows] = UNUSED
        if self.attention is not None:
            self.attention[feed.all_rows] = 0.0
        place = torch.arange(width, device=key.device)
        is_unused = (place >= feed.n_kept[:, None])[:, None]
        kept = (feed.n_padding[:, None] + place).clamp(max=n_candidates - 1)
        kept = kept[:, None].repeat(1, key.shape[1], 1)
        before = self.evicted_at[feed.sources]
        view = None if feed.due is None else self._view_of(feed, key, value, columns, attention)
        for sample in range(feed.n_samples):
            rows = feed.rows_of(sample)
            if sample == 0 or (policy is not None and policy.draws):
                evicted_at = before
                if feed.due is not None and view is not None:
                    slots, is_kept = self._survivors(feed, view)
                    kept[feed.due] = slots[..., :width]
                    # The last given token is the last query to see the keys that are evicted.
                    now, first = feed.newest[feed.due] + 1, feed.first[feed.due]
                    recorded = record_evictions(before[feed.due], columns[feed.due], is_kept, now, first)
                    evicted_at = before.index_copy(0, feed.due, recorded)
                kept_keys, kept_values = (each.map(partial(take_slots, slots=kept)) for each in (key, value))
            self.evicted_at[rows] = evicted_at
            keys.put(rows, kept_keys)
            values.put(rows, kept_values)
            if policy is not None:
                self.columns[rows, :, :width] = columns.gather(2, kept).masked_fill(is_unused, UNUSED)
            if self.attention is not None and attention is not None:
                self.attention[rows, :, :width] = attention.gather(2, kept).masked_fill(is_unused, 0.0)

    def _survivors(
        self, feed: Feed, view: SlotView
    ) -> tuple[Int[Tensor, "due kv_head kept"], Bool[Tensor, "due kv_head candidate"]]:
        """Return the candidates that the policy keeps of each due row; see `choose_survivors`."""
        policy, due = self.cache.policy, feed.due
        assert policy is not None
        assert due is not None
        scores, now = policy.score(view)[due], feed.newest[due] + 1
        return choose_survivors(scores, view.columns[due], now, feed.first[due], **self.limits)

    def _view_of(
        self, feed: Feed, key: Slots, value: Slots, columns: Tensor, attention: Tensor | None
    ) -> SlotView:
        """Return the policy's input for the rows of a feed."""
        return self._view(
            rows=feed.sources,
            keys=key,
            values=value,
            columns=columns,
            attention=attention,
            newest=feed.newest,
            first=feed.first,
            is_due=feed.is_due,
        )

    def _decode(
        self, query: Tensor, key: Slots, value: Slots, scaling: float, softcap: float | None
    ) -> Tensor:
        """Write one key per row, attend, and record the inputs of the policy."""
        cache, policy, n_live = self.cache, self.cache.policy, self.cache.n_live[self.group]
        n_rows, n_kv_heads = key.shape[:2]
        places = self._write(n_live - 1, key, value)
        packed = query.reshape(n_rows, n_kv_heads, -1, query.shape[-1])
        if policy is not None:
            columns = cache.column[:, None].expand(-1, n_kv_heads).flatten()
            self.columns.view(-1).index_copy_(0, places, columns)
        if self.recent_queries is not None:
            self.recent_queries.write(cache.column, packed)
        n_read = None if cache.n_read is None else cache.n_read[self.group]
        tracked = None if policy is None else policy.tracks_attention
        received = None
        if self.attention is not None and tracked != "renewed":
            received = self.attention[:, :, :n_read]
        out = self._attend_to_slots(
            packed,
            n_read,
            n_live,
            scaling,
            softcap,
            received=received,
            accumulates=tracked == "sum",
        )
        return out.reshape(n_rows, -1, 1, out.shape[-1])

    def _attend_to_slots(
        self,
        query: Float[Tensor, "row kv_head group dim"],
        n_read: int | None,
        n_live: Int[Tensor, " row"],
        scaling: float,
        softcap: float | None,
        **received: Any,
    ) -> Float[Tensor, "row kv_head group dim_v"]:
        """Return the attention of one query of each row over the leading slots; None: over all."""
        keys, values = (pool.first(n_read) for pool in self._pools())
        if keys.balance is not None:
            query = query * keys.balance
        return decode_attention(
            query,
            keys.parts[0],
            values.parts[0],
            n_live,
            scaling,
            softcap=softcap,
            sink=self.sink,
            n_splits=self.cache.n_splits,
            kv_dtype=keys.kv_dtype,
            scales=[*keys.scales, *values.scales],
            **received,
        )

    def _write(self, slots: Int[Tensor, " row"], key: Slots, value: Slots) -> Int[Tensor, " place"]:
        """Write one key and value to this slot of each row's heads; return the places in the flat pool."""
        pools = self._pools()
        places = (self.first_slot + slots[:, None]).flatten()
        for pool, new in zip(pools, (key, value), strict=True):
            pool.write(places, new)
        return places

    def table(self, rows: Int[Tensor, " row"]) -> Int[Tensor, "row kv_head seq"]:
        """Return, for each key of these rows, the first column whose query no longer sees it."""
        return wide(self.evicted_at[rows])

    def compact(self, is_due: Bool[Tensor, " row"]) -> None:
        """Keep the `budget` keys of highest score in each due row, in the order of their columns."""
        cache, policy = self.cache, self.cache.policy
        keys, values = self._pools()
        assert policy is not None
        # Nothing is copied here: a score reads what it needs, of the due rows only. But codes are turned into
        # numbers of all rows, once a score asks for them.
        view = self._view(
            rows=slice(None),
            keys=keys,
            values=values,
            columns=self.columns,
            attention=self.attention,
            newest=cache.column,
            first=cache.first,
            is_due=is_due,
        )
        scores = policy.score(view)
        running = None if policy.tracks_attention == "last" else self.attention
        evict(
            scores,
            keys.parts[0],
            values.parts[0],
            self.columns,
            running,
            self.evicted_at,
            is_due,
            cache.column + 1,
            cache.first,
            scales=[*keys.scales, *values.scales],
            **self.limits,
        )
        is_behind = torch.arange(keys.shape[2], device=keys.device) >= cache.budgets[self.group][:, None]
        is_free = (is_behind & is_due[:, None])[:, None]
        self.columns.masked_fill_(is_free, UNUSED)
        if running is not None:
            running.masked_fill_(is_free, 0.0)

    def _pools(self) -> tuple[Slots, Slots]:
        """Return the keys and values of all rows."""
        if self.pools is None:
            raise ValueError("the cache is empty; run the forward of a prompt inside cache.feed first")
        return self.pools

    def _view(
        self,
        rows: Int[Tensor, " batch"] | slice,
        keys: Slots,
        values: Slots,
        columns: Int[Tensor, "batch kv_head slot"],
        attention: Float[Tensor, "batch kv_head slot"] | None,
        newest: Int[Tensor, " batch"],
        first: Int[Tensor, " batch"],
        is_due: Bool[Tensor, " batch"],
    ) -> SlotView:
        """Return the policy's input for these rows, whose latest query is at column `newest`.

        A policy that renews `attention` has done so, in place.
        """
        policy, spec, window = self.cache.policy, self.cache.spec, self.cache.spec.window
        queries = query_columns = None
        if self.recent_queries is not None:
            queries, query_columns = self.recent_queries.read(rows, newest)
        view = SlotView(
            key_slots=keys,
            value_slots=values,
            columns=columns,
            is_live=columns >= first[:, None, None],
            is_recent=columns > (newest - window)[:, None, None],
            is_first=columns < (first + spec.sink).clamp(min=self.cache.prompt_end)[:, None, None],
            budget=self.budget,
            queries=queries,
            query_columns=query_columns,
            attention=attention,
            scaling=self.scaling,
            generator=self.cache.generator,
            is_due=is_due,
            now=newest + 1,
            scorer=self.scorer,
            frequencies=self.cache.frequencies,
            layer=self.number,
            first=first,
            projection=self.projection,
        )
        if policy is not None and policy.tracks_attention == "renewed" and attention is not None:
            attention.copy_(torch.where(is_due[:, None, None], policy.renew(view), attention))
        return view
