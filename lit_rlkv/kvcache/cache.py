"""The evicting cache: a pool of slots per layer, compacted in place, and the death of every key on record."""

import weakref
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from lit_rlkv.kernels.decode_attention import decode_attention
from lit_rlkv.kernels.shadow_attention import shadow_attention
from lit_rlkv.kvcache.policies import SlotView
from lit_rlkv.kvcache.schedule import DecodeStep, plan_schedule
from lit_rlkv.kvcache.spec import CacheSpec
from lit_rlkv.types import NEVER

PREFILL_CHUNK = 128
"""Queries per block when attention is summed over a prompt: bounds the memory at [chunk, prompt]."""


class SlotCache(Cache):
    """KV cache of a batch of left-padded prompts, for any transformers model whose attention we compute.

    `generate` calls `advance()` before each decoded token; the layers do the rest from within the attention
    function.
    """

    def __init__(
        self,
        spec: CacheSpec,
        n_layers: int,
        is_prompt: Bool[Tensor, "batch prompt"],
        n_steps: int,
        generator: torch.Generator | None = None,
    ) -> None:
        n_prompt_columns = is_prompt.shape[1]
        self.spec = spec
        self.policy = spec.make_policy()
        self.generator = generator
        self.is_prompt = is_prompt
        self.n_padding = n_prompt_columns - is_prompt.sum(dim=1)
        self.seq_len = n_prompt_columns + n_steps
        self.n_slots = spec.n_slots(self.seq_len)
        prompt_lens = is_prompt.sum(dim=1).tolist()
        self.schedule = plan_schedule(spec, prompt_lens, n_prompt_columns, n_steps, is_prompt.device)
        self.n_columns = 0
        self.current: DecodeStep | None = None
        self.slot_layers = [SlotLayer(self) for _ in range(n_layers)]
        super().__init__(layers=list(self.slot_layers))

    def advance(self, n_decoded: int) -> None:
        """Announce the decoding of response token number `n_decoded` (from 0)."""
        self.current = self.schedule.step(n_decoded)
        self.n_columns = self.current.column

    @property
    def death(self) -> Int[Tensor, "batch layer kv_head seq"]:
        """First query column that no longer sees each key, so far."""
        return torch.stack([layer.death for layer in self.slot_layers], dim=1)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pools, allocated once at prefill."""
        return sum(layer.kv_bytes for layer in self.slot_layers)


class SlotLayer(CacheLayerMixin):
    """One layer's pool: transformers hands it new keys by `update`, the attention function calls `attend`."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A strong reference would close a cycle, and the pools would outlive the rollout until the next
        # garbage collection.
        self.cache: SlotCache = weakref.proxy(cache)
        self.death: Int[Tensor, "batch kv_head seq"]
        self.columns: Int[Tensor, "batch kv_head slot"]
        self.recent_queries: Float[Tensor, "batch kv_head group window dim"] | None = None
        self.attention_sum: Float[Tensor, "batch kv_head slot"] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: prefill builds the pool from the prompt's keys."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass through: keys enter the pool in `attend`, where the queries are known too."""
        return key_states, value_states

    @property
    def kv_bytes(self) -> int:
        """Bytes of this layer's pool; 0 before prefill."""
        return sum(pool.nbytes for pool in (self.keys, self.values) if pool is not None)

    def get_seq_length(self) -> int:
        return self.cache.n_columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.keys is None else self.cache.n_slots), 0

    def attend(
        self,
        query: Float[Tensor, "batch head seq dim"],
        key: Float[Tensor, "batch kv_head seq dim"],
        value: Float[Tensor, "batch kv_head seq dim_v"],
        scaling: float,
    ) -> Float[Tensor, "batch head seq dim_v"]:
        """Attention over what the cache holds, then the writes, scores and evictions that follow from it."""
        step = self._prefill if self.keys is None else self._decode
        return step(query, key, value, scaling)

    def _prefill(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Dense attention over the prompt, which then moves into the pool: `budget` keys of a row at most."""
        cache = self.cache
        batch, n_kv_heads, n_columns, _ = key.shape
        alive = torch.where(cache.is_prompt[:, None], NEVER, 0).int()
        out = shadow_attention(query, key, value, alive, scaling)

        self.death = torch.full(
            (batch, n_kv_heads, cache.seq_len), NEVER, dtype=torch.int32, device=key.device
        )
        self.death[..., :n_columns] = alive
        column = torch.arange(n_columns, device=key.device).expand(batch, n_kv_heads, -1)
        kept = cache.n_padding[:, None] + torch.arange(cache.n_slots, device=key.device)
        kept = kept.clamp(max=n_columns - 1)[:, None].repeat(1, n_kv_heads, 1)
        attention = None
        if cache.policy is not None:
            packed = query.reshape(batch, n_kv_heads, -1, *query.shape[2:])
            if cache.policy.sees_queries:
                self._remember_prompt_queries(packed)
            if cache.policy.tracks_attention is not None:
                attention = self._prompt_attention(packed, key, scaling)
            if cache.schedule.prompt_due is not None:
                rows = whole_batch_as_slice(cache.schedule.prompt_due, batch)
                view = self._view(rows, key, value, column, attention, scaling, last_column=n_columns - 1)
                kept[rows, :, : cache.spec.budget] = self._evict(rows, view, now=n_columns)
            if cache.policy.tracks_attention == "sum" and attention is not None:
                self.attention_sum = attention.gather(2, kept)
        self.columns = kept
        self.keys, self.values = take_slots(key, kept), take_slots(value, kept)
        self.is_initialized = True
        return out

    def _decode(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        cache, policy, step = self.cache, self.cache.policy, self.cache.current
        assert self.keys is not None
        assert self.values is not None
        if step is None:
            raise ValueError(
                "a layer attends twice in one forward, but the cache has one set of keys per layer"
            )
        batch, n_kv_heads = key.shape[:2]
        slot = step.slot[:, None, None].expand(-1, n_kv_heads, 1)
        places = flat_slots(slot, cache.n_slots)
        for pool, new in ((self.keys, key), (self.values, value)):
            pool.view(-1, pool.shape[-1]).index_copy_(0, places, new.reshape(-1, new.shape[-1]))
        packed = query.reshape(batch, n_kv_heads, -1, query.shape[-1])
        out, probs = decode_attention(packed, self.keys, self.values, step.is_live, scaling)
        if policy is not None:
            self.columns.scatter_(2, slot, step.column)
            if self.recent_queries is not None:
                self.recent_queries[:, :, :, step.column % cache.spec.window] = packed
            if self.attention_sum is not None:
                self.attention_sum.scatter_(2, slot, 0.0).add_(probs.mean(dim=2))
            if step.due is not None:
                attention = probs.mean(dim=2) if policy.tracks_attention == "last" else self.attention_sum
                self._compact(step.due, attention, scaling, last_column=step.column)
        return out.reshape(batch, -1, 1, value.shape[-1])

    def _compact(self, due: Tensor, attention: Tensor | None, scaling: float, last_column: int) -> None:
        """Move the survivors of each full row to the front of its pool, in the order of their columns."""
        assert self.keys is not None
        assert self.values is not None
        rows = whole_batch_as_slice(due, len(self.keys))
        view = self._view(rows, self.keys, self.values, self.columns, attention, scaling, last_column)
        survivors = self._evict(rows, view, now=last_column + 1)
        budget = self.cache.spec.budget
        self.keys[rows, :, :budget] = take_slots(view.keys, survivors)
        self.values[rows, :, :budget] = take_slots(view.values, survivors)
        self.columns[rows, :, :budget] = view.columns.gather(2, survivors)
        if self.attention_sum is not None and view.attention is not None:
            self.attention_sum[rows, :, :budget] = view.attention.gather(2, survivors)

    def _evict(self, rows: Tensor | slice, view: SlotView, now: int) -> Int[Tensor, "due kv_head budget"]:
        """The slots that survive, in the order of their columns; all others die at column `now`."""
        cache = self.cache
        assert cache.policy is not None
        is_sink = view.columns < (cache.n_padding[rows] + cache.spec.sink)[:, None, None]
        scores = cache.policy.score(view).masked_fill(is_sink | view.is_recent, torch.inf)
        scores = scores.masked_fill(~view.is_live, -torch.inf)
        # A stable sort breaks ties by position; the second sort restores the order of the columns.
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        survivors = order[..., : cache.spec.budget].sort(dim=-1).values
        death = torch.full_like(view.columns, now, dtype=torch.int32).scatter(2, survivors, NEVER)
        death = death.masked_fill(~view.is_live, 0)
        self.death[rows] = self.death[rows].scatter(2, view.columns, death)
        return survivors

    def _view(
        self,
        rows: Int[Tensor, " due"] | slice,
        keys: Float[Tensor, "batch kv_head slot dim"],
        values: Float[Tensor, "batch kv_head slot dim_v"],
        columns: Int[Tensor, "batch kv_head slot"],
        attention: Float[Tensor, "batch kv_head slot"] | None,
        scaling: float,
        last_column: int,
    ) -> SlotView:
        """What the policy is shown of the full rows, the token at `last_column` having just been attended."""
        window = self.cache.spec.window
        recent = torch.arange(last_column + 1 - window, last_column + 1, device=keys.device)
        queries = self.recent_queries
        due_columns = columns[rows]
        return SlotView(
            keys=keys[rows],
            values=values[rows],
            columns=due_columns,
            is_live=due_columns >= self.cache.n_padding[rows][:, None, None],
            is_recent=due_columns > last_column - window,
            queries=None if queries is None else queries[rows][:, :, :, recent % window],
            query_columns=None if queries is None else recent.expand(len(due_columns), -1),
            attention=None if attention is None else attention[rows],
            scaling=scaling,
            generator=self.cache.generator,
        )

    def _remember_prompt_queries(self, query: Float[Tensor, "batch kv_head group prompt dim"]) -> None:
        """Start the ring of recent queries: the query of column c stands at c % window."""
        window, n_columns = self.cache.spec.window, query.shape[3]
        recent = torch.arange(max(n_columns - window, 0), n_columns, device=query.device)
        self.recent_queries = query.new_zeros((*query.shape[:3], window, query.shape[4]))
        self.recent_queries[:, :, :, recent % window] = query[:, :, :, recent]

    def _prompt_attention(
        self,
        query: Float[Tensor, "batch kv_head group prompt dim"],
        key: Float[Tensor, "batch kv_head prompt dim"],
        scaling: float,
    ) -> Float[Tensor, "batch kv_head prompt"]:
        """Attention that each key of the prompt received: from the last query, or summed over all of them."""
        assert self.cache.policy is not None
        n_columns = key.shape[2]
        column = torch.arange(n_columns, device=key.device)
        first = n_columns - 1 if self.cache.policy.tracks_attention == "last" else 0
        received = torch.zeros(key.shape[:3], device=key.device, dtype=torch.float32)
        for block in torch.split(column[first:], PREFILL_CHUNK):
            logits = (query[:, :, :, block] @ key.transpose(-1, -2).unsqueeze(2)).float() * scaling
            is_seen = self.cache.is_prompt[:, None] & (column <= block[:, None])
            probs = logits.masked_fill(~is_seen[:, None, None], -torch.inf).softmax(-1)
            is_query = self.cache.is_prompt[:, None, None, block][..., None]
            received += probs.masked_fill(~is_query, 0.0).sum(dim=3).mean(dim=2)
        return received


def whole_batch_as_slice(rows: Int[Tensor, " due"], batch: int) -> Int[Tensor, " due"] | slice:
    """Equal prompts fill up together; picking all rows out of the batch would copy the pool for nothing."""
    return slice(None) if len(rows) == batch else rows


def take_slots(
    pool: Float[Tensor, "batch kv_head slot dim"], slots: Int[Tensor, "batch kv_head kept"]
) -> Float[Tensor, "batch kv_head kept dim"]:
    """The chosen slots of each row and head, moved as whole vectors; gather would move single numbers."""
    vectors = pool.reshape(-1, pool.shape[-1])
    return vectors.index_select(0, flat_slots(slots, pool.shape[2])).view(*slots.shape, -1)


def flat_slots(slots: Int[Tensor, "batch kv_head kept"], n_slots: int) -> Int[Tensor, " vector"]:
    """Places of the slots in a pool seen as one list of vectors [batch·kv_head·slot, dim]."""
    pools = torch.arange(slots.shape[0] * slots.shape[1], device=slots.device).view(*slots.shape[:2], 1)
    return (pools * n_slots + slots).flatten()
