"""SlotLayer: one layer of the evicting cache, with its pool of slots and the inputs of its policy."""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from lit_rlkv.kernels.backend import to_autocast_dtype
from lit_rlkv.kernels.decode_attention import decode_attention
from lit_rlkv.kernels.evict import choose_survivors, evict, take_slots
from lit_rlkv.kernels.shadow_attention import replayed_attention
from lit_rlkv.kvcache.policies import SlotView
from lit_rlkv.kvcache.prompt_attention import prompt_attention
from lit_rlkv.kvcache.recent_queries import RecentQueries
from lit_rlkv.types import NEVER

UNUSED = -1
"""Column of a slot that holds no key."""
FOREIGN_LOOP = (
    "a SlotCache must be decoded by lit_rlkv.generate: the decoding loop of transformers does not fill it; "
    "leave past_key_values out, and pass custom_generate=lit_rlkv.integrations.transformers.generate and "
    "cache=CacheSpec(...) to model.generate"
)

if TYPE_CHECKING:
    from lit_rlkv.kvcache.cache import LayerKind, Prefill, SlotCache


class SlotLayer(CacheLayerMixin):
    """Pool of one layer. transformers calls `update` with new keys, the attention function calls `attend`."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: "SlotCache", kind: "LayerKind") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A strong reference would close a cycle, and the pools would outlive the rollout until the next
        # garbage collection.
        self.cache: SlotCache = weakref.proxy(cache)
        self.kind = kind
        self.scaling = 1.0
        self.sink: Float[Tensor, "kv_head group"] | None = None
        self.filled_by: Prefill | None = None
        self.evicted_at: Int[Tensor, "row kv_head seq"]
        self.columns: Int[Tensor, "row kv_head slot"]
        """`UNUSED` in the slots without a key. A dense cache, which never compacts, does not allocate it."""
        self.first_slot: Int[Tensor, "row kv_head"]
        self.recent_queries: RecentQueries | None = None
        self.attention: Float[Tensor, "row kv_head slot"] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing; prefill allocates the pool."""

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
        return sum(pool.nbytes for pool in (self.keys, self.values) if pool is not None)

    @property
    def n_kv_heads(self) -> int:
        """KV heads of this layer, after the first prefill."""
        return self._pools()[0].shape[1]

    def get_seq_length(self) -> int:
        """Return the columns of the prompts, and 0 during prefill.

        The length of each row is known on the device only. Models use this number only to tell prefill from
        decoding, because they are given `position_ids`.
        """
        return 0 if self.cache.incoming is not None or self.filled_by is None else self.filled_by.n_columns

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

        At prefill the attention is dense, and the keys that fit the budget are written after it.
        """
        self.scaling = scaling
        self.sink = None if sink is None else sink.view(key.shape[1], -1)
        # Rotated keys are float32; the cache holds them in the dtype that the learner's attention casts to.
        query, key, value = to_autocast_dtype(query, key, value)
        step = self._decode if self.cache.incoming is None else self._prefill
        with torch.autocast(query.device.type, enabled=False):
            return step(query, key, value, scaling, softcap)

    def _prefill(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None
    ) -> Tensor:
        """Attend densely over the prompts, then write at most `budget` keys of each to the pool."""
        incoming, policy = self._begin(), self.cache.policy
        evicted_at = torch.where(incoming.is_prompt[:, None], NEVER, 0).int()
        out = replayed_attention(query, key, value, evicted_at, scaling, softcap=softcap, sink=self.sink)
        packed = query.reshape(key.shape[0], key.shape[1], -1, *query.shape[2:])
        if self.keys is None:
            self._allocate(packed, key, value)
        self.evicted_at[incoming.all_rows] = NEVER
        self.evicted_at[incoming.all_rows, :, : key.shape[2]] = evicted_at.repeat_interleave(
            incoming.n_samples, dim=0
        )
        attention = None
        if policy is not None and policy.tracks_attention is not None:
            last_only = policy.tracks_attention == "last"
            attention = prompt_attention(
                packed, key, incoming.is_prompt, scaling, softcap, self.sink, last_only=last_only
            )
        if self.recent_queries is not None:
            self.recent_queries.write_prompts(incoming.rows, packed)
        self._fill(incoming, key, value, attention)
        return out

    def _begin(self) -> "Prefill":
        """Return the prompts to fill the pool from.

        Raises:
            ValueError: this layer has filled it from them already.
        """
        incoming = self.cache.incoming
        assert incoming is not None
        if self.filled_by is incoming:
            raise ValueError(
                "a layer attends twice in one forward, but the cache has one set of keys per layer; use a "
                "model that attends once per layer"
            )
        self.filled_by = incoming
        return incoming

    def _allocate(self, packed: Tensor, key: Tensor, value: Tensor) -> None:
        """Allocate pool and records of all rows; zeroed, because NaN in an unused slot could spread."""
        cache, (_, n_kv_heads, _, dim) = self.cache, key.shape
        shape = (cache.n_rows, n_kv_heads, cache.n_slots)
        self.keys, self.values = key.new_zeros(*shape, dim), value.new_zeros(*shape, value.shape[-1])
        self.evicted_at = key.new_full((*shape[:2], cache.seq_len), NEVER, dtype=torch.int32)
        self._number_slots()
        self.is_initialized = True
        if cache.policy is None:
            return
        self.columns = key.new_full(shape, UNUSED, dtype=torch.long)
        if cache.policy.sees_queries:
            self.recent_queries = RecentQueries(packed, cache.n_rows, cache.spec.window)
        if cache.policy.tracks_attention is not None:
            self.attention = key.new_zeros(shape, dtype=torch.float32)

    def _number_slots(self) -> None:
        n_rows, n_kv_heads, n_slots = self._pools()[0].shape[:3]
        pools = torch.arange(n_rows * n_kv_heads, device=self._pools()[0].device)
        self.first_slot = pools.view(n_rows, n_kv_heads) * n_slots

    def resize(self, rows: Int[Tensor, " kept"]) -> None:
        """Move these rows to pools of the cache's present sizes; the old ones are freed one by one."""
        n_slots = self.cache.n_slots
        keys, values = self._pools()
        self.keys = _widened(keys, rows, n_slots)
        del keys
        self.values = _widened(values, rows, n_slots)
        self.evicted_at = self.evicted_at[rows]
        self._number_slots()

    def _fill(self, incoming: "Prefill", key: Tensor, value: Tensor, attention: Tensor | None) -> None:
        """Copy the kept keys of each prompt into all of its rows."""
        policy, n_columns = self.cache.policy, key.shape[2]
        keys, values = self._pools()
        width = n_columns if policy is None else min(n_columns, self.cache.spec.budget)
        kept = incoming.n_padding[:, None] + torch.arange(width, device=key.device)
        is_unused = (kept >= n_columns)[:, None]
        kept = kept.clamp(max=n_columns - 1)[:, None].repeat(1, key.shape[1], 1)
        if policy is not None:
            self.columns[incoming.all_rows] = UNUSED
        for sample in range(incoming.n_samples):
            rows = incoming.rows_of(sample)
            is_new = sample == 0 or (policy is not None and policy.draws)
            if incoming.due is not None:
                if is_new:
                    kept[incoming.due] = self._prompt_survivors(incoming, key, value, attention)
                rows_due = incoming.rows[sample :: incoming.n_samples][incoming.due]
                # The prompt's last query is the last to see the keys that are evicted.
                evicted_at = self.evicted_at[rows_due, :, :n_columns]
                is_evicted = (evicted_at == NEVER).scatter(2, kept[incoming.due], False)
                self.evicted_at[rows_due, :, :n_columns] = evicted_at.masked_fill(is_evicted, n_columns)
            if is_new:
                kept_keys, kept_values = take_slots(key, kept), take_slots(value, kept)
            keys[rows, :, :width] = kept_keys
            values[rows, :, :width] = kept_values
            if policy is not None:
                self.columns[rows, :, :width] = kept.masked_fill(is_unused, UNUSED)
            if self.attention is not None and attention is not None:
                self.attention[rows, :, :width] = attention.gather(2, kept)

    def _prompt_survivors(
        self, incoming: "Prefill", key: Tensor, value: Tensor, attention: Tensor | None
    ) -> Int[Tensor, "due kv_head budget"]:
        """Return the columns that the policy keeps of each prompt longer than the budget, ascending."""
        spec, policy, due, n_columns = self.cache.spec, self.cache.policy, incoming.due, key.shape[2]
        assert policy is not None
        assert due is not None
        newest, first = torch.full_like(incoming.n_padding, n_columns - 1), incoming.n_padding
        view = self._view(
            rows=incoming.rows[:: incoming.n_samples],
            keys=key,
            values=value,
            columns=torch.arange(n_columns, device=key.device).expand(*key.shape[:2], -1),
            attention=attention,
            newest=newest,
            first=first,
            is_due=incoming.is_due,
        )
        limits = {"budget": spec.budget, "sink": spec.sink, "window": spec.window}
        return choose_survivors(
            policy.score(view)[due], view.columns[due], newest[due] + 1, first[due], **limits
        )

    def _decode(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None
    ) -> Tensor:
        """Write one key per row, attend, and record the inputs of the policy."""
        cache, policy = self.cache, self.cache.policy
        keys, values = self._pools()
        n_rows, n_kv_heads = key.shape[:2]
        places = self._write(self.first_slot + (cache.n_live - 1)[:, None], key, value)
        packed = query.reshape(n_rows, n_kv_heads, -1, query.shape[-1])
        if policy is not None:
            columns = cache.column[:, None].expand(-1, n_kv_heads).flatten()
            self.columns.view(-1).index_copy_(0, places, columns)
        if self.recent_queries is not None:
            self.recent_queries.write(cache.column, packed)
        read = slice(cache.n_read)
        out = decode_attention(
            packed,
            keys[:, :, read],
            values[:, :, read],
            cache.n_live,
            scaling,
            softcap=softcap,
            sink=self.sink,
            received=None if self.attention is None else self.attention[:, :, read],
            accumulates=policy is not None and policy.tracks_attention == "sum",
            n_splits=cache.n_splits,
        )
        return out.reshape(n_rows, -1, 1, value.shape[-1])

    def _write(self, places: Int[Tensor, "row kv_head"], key: Tensor, value: Tensor) -> Int[Tensor, " place"]:
        """Write one key and value of each row and head to these slots of the whole pool; return them flat."""
        flat = places.flatten()
        for pool, new in zip(self._pools(), (key, value), strict=True):
            pool.view(-1, pool.shape[-1]).index_copy_(0, flat, new.reshape(-1, new.shape[-1]))
        return flat

    def table(self, rows: Int[Tensor, " row"]) -> Int[Tensor, "row kv_head seq"]:
        """Return, for each key of these rows, the first column whose query no longer sees it."""
        return self.evicted_at[rows]

    def compact(self, is_due: Bool[Tensor, " row"]) -> None:
        """Keep the `budget` keys of highest score in each due row, in the order of their columns."""
        cache, policy = self.cache, self.cache.policy
        keys, values = self._pools()
        assert policy is not None
        # Nothing is copied here: a score reads what it needs, of the due rows only.
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
        running = self.attention if policy.tracks_attention == "sum" else None
        evict(
            scores,
            keys,
            values,
            self.columns,
            running,
            self.evicted_at,
            is_due,
            cache.column + 1,
            cache.first,
            budget=cache.spec.budget,
            sink=cache.spec.sink,
            window=cache.spec.window,
        )
        self.columns[:, :, cache.spec.budget :].masked_fill_(is_due[:, None, None], UNUSED)

    def _pools(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all rows, [row, kv_head, slot, dim]."""
        if self.keys is None or self.values is None:
            raise ValueError("the cache is empty; run the forward of a prompt inside cache.prefill first")
        return self.keys, self.values

    def _view(
        self,
        rows: Int[Tensor, " batch"] | slice,
        keys: Float[Tensor, "batch kv_head slot dim"],
        values: Float[Tensor, "batch kv_head slot dim_v"],
        columns: Int[Tensor, "batch kv_head slot"],
        attention: Float[Tensor, "batch kv_head slot"] | None,
        newest: Int[Tensor, " batch"],
        first: Int[Tensor, " batch"],
        is_due: Bool[Tensor, " batch"],
    ) -> SlotView:
        """Return the policy's input for these rows, whose latest query is at column `newest`."""
        window = self.cache.spec.window
        queries = query_columns = None
        if self.recent_queries is not None:
            queries, query_columns = self.recent_queries.read(rows, newest)
        return SlotView(
            keys=keys,
            values=values,
            columns=columns,
            is_live=columns >= first[:, None, None],
            is_recent=columns > (newest - window)[:, None, None],
            queries=queries,
            query_columns=query_columns,
            attention=attention,
            scaling=self.scaling,
            generator=self.cache.generator,
            is_due=is_due,
        )


def _widened(pool: Float[Tensor, "row kv_head slot dim"], rows: Int[Tensor, " kept"], n_slots: int) -> Tensor:
    """Return a copy of some rows with more slots; zeroed, because NaN in an unused slot could spread."""
    wider = pool.new_zeros(len(rows), pool.shape[1], n_slots, pool.shape[3])
    wider[:, :, : pool.shape[2]] = pool[rows]
    return wider
