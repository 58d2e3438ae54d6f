"""Shadow attention in plain torch without the whole square: what runs on CPUs, or without Triton.

Long sequences are cut into blocks of queries. Each block attends to the keys that are cached in it, gathered
from the sequence. Rows without evictions are causal and need no mask. Short sequences take the definition.
"""

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lit_rlkv.kernels.backend import in_autocast_dtype
from lit_rlkv.kernels.shadow_attention import reference
from lit_rlkv.kernels.shadow_attention.plan import MAX_WORK, CachedBlocks, SlotPlan

BLOCK = 64
"""Queries that share a list of keys."""
SHORT = 256
"""Length up to which the definition is as fast."""
LONG = 1024
"""Length from which lists of almost all keys are no slower than the definition, and take less memory."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""Attention of query, key and value under a mask of visible pairs: output and, if any, log-sum-exp."""


def _in_blocks(definition: Callable[..., Any], *, with_lse: bool) -> Callable[..., Any]:
    """Return a function that computes the definition, in blocks where that pays."""

    def attend(*block: Any, **options: Any) -> tuple[Tensor, ...]:
        if with_lse:
            return reference.masked_attention_with_lse(*block, **options)
        return (reference.masked_attention(*block, **options),)

    @in_autocast_dtype
    @wraps(definition)
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        evicted_at: Tensor,
        scaling: float,
        *,
        softcap: float | None = None,
        plan: SlotPlan | None = None,
    ) -> Any:
        is_plain = softcap is None and not with_lse
        if is_plain and (ranges := _causal_ranges(evicted_at)) is not None:
            return _causal_attention(query, key, value, ranges, scaling)
        if (n_keys := _n_keys_of_blocks(evicted_at)) is None:
            return definition(query, key, value, evicted_at, scaling, softcap=softcap)
        of_block = partial(attend, scaling=scaling, softcap=softcap)
        found = _BlockAttention.apply(query, key, value, evicted_at, n_keys, of_block)  # type: ignore[no-untyped-call]
        return found if with_lse else found[0]

    return attention


shadow_attention = _in_blocks(reference.shadow_attention, with_lse=False)
shadow_attention_with_lse = _in_blocks(reference.shadow_attention_with_lse, with_lse=True)


def _causal_ranges(evicted_at: Int[Tensor, "batch table seq"]) -> list[tuple[int, int]] | None:
    """Return the columns [begin, end) of the keys of each row, if no query there misses an earlier key.

    None for short sequences, and if any row has evictions, gaps, no key, or queries after its last key that
    see any.
    """
    seq = evicted_at.shape[-1]
    if seq <= SHORT or not len(evicted_at):
        return None
    lowest, highest = evicted_at.amin(1), evicted_at.amax(1)
    is_key = highest > 0
    begin, end = is_key.int().argmax(1), seq - is_key.flip(1).int().argmax(1)
    is_causal = (is_key.sum(1) == end - begin) & (lowest.masked_fill(~is_key, seq).amin(1) >= end)
    is_causal &= (end == seq) | (highest.amax(1) <= end)
    return list(zip(begin.tolist(), end.tolist(), strict=True)) if bool(is_causal.all()) else None


def _causal_attention(
    query: Tensor, key: Tensor, value: Tensor, ranges: list[tuple[int, int]], scaling: float
) -> Tensor:
    """Return causal attention within the range of columns of each row, and 0 elsewhere."""
    seq, is_grouped = query.shape[2], query.shape[1] > key.shape[1]
    n_rows = len(query) if len(set(ranges)) == 1 else 1  # at a time
    outs = []
    for row in range(0, len(query), n_rows):
        begin, end = ranges[row]
        queries, keys, values = (t[row : row + n_rows, :, begin:end] for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scaling, enable_gqa=is_grouped
        )
        outs.append(F.pad(out, (0, 0, begin, seq - end)))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _n_keys_of_blocks(evicted_at: Int[Tensor, "batch table seq"]) -> list[int] | None:
    """Return the most keys of a row that are cached in each block of queries; None if it saves nothing."""
    seq = evicted_at.shape[-1]
    if seq <= SHORT or not len(evicted_at):
        return None
    blocks = CachedBlocks(evicted_at.flatten(0, 1), BLOCK)
    if seq < LONG and float(blocks.work()) > MAX_WORK:
        return None
    most: list[int] = blocks.counts(blocks.is_cached).amax(0).clamp(min=1).tolist()
    return most


class _BlockAttention(torch.autograd.Function):
    """Attention of each block of queries to its keys; the backward pass computes a block again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        evicted_at: Tensor,
        n_keys: list[int],
        attend: Attend,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(query, key, value, evicted_at)
        ctx.n_keys, ctx.attend = n_keys, attend
        parts = [attend(*block) for block, _ in _gathered(query, key, value, evicted_at, n_keys)]
        results = (torch.cat(each, dim=2) for each in zip(*parts, strict=True))
        return tuple(each.view(*query.shape[:3], *each.shape[3:]) for each in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, evicted_at = ctx.saved_tensors
        n_tables = evicted_at.shape[1]
        blocks = zip(
            *(torch.split(_by_table(each, n_tables), BLOCK, dim=2) for each in upstream), strict=True
        )
        d_query = []
        # A key is in several blocks: 16 bits would round each sum.
        d_key, d_value = (
            torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32))
            for t in (_by_key(key, n_tables), _by_key(value, n_tables))
        )
        for (block, at), gradients in zip(
            _gathered(query, key, value, evicted_at, ctx.n_keys), blocks, strict=True
        ):
            leaves = [t.detach().requires_grad_() for t in block[:3]]
            with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
                results = ctx.attend(*leaves, block[3])
            of_query, *of_keys = torch.autograd.grad(results, leaves, gradients)
            d_query.append(of_query)
            for total, part in zip((d_key, d_value), of_keys, strict=True):
                total.index_add_(0, at, part.transpose(1, 2).flatten(0, 1).to(total.dtype))
        of_keys = [
            total.view(-1, t.shape[2], *total.shape[1:]).transpose(1, 2).reshape(t.shape).to(t.dtype)
            for total, t in ((d_key, key), (d_value, value))
        ]
        return torch.cat(d_query, dim=2).view(query.shape), *of_keys, None, None, None


def _gathered(
    query: Tensor, key: Tensor, value: Tensor, evicted_at: Tensor, n_keys: list[int]
) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Yield query, key, value and mask [row 1 query key] of each block, and its keys in `_by_key`."""
    n_tables, seq = evicted_at.shape[1:]
    by_key = [_by_key(t, n_tables) for t in (key, value)]
    tables = evicted_at.flatten(0, 1)
    starts = seq * torch.arange(len(tables), device=query.device)[:, None]
    columns = torch.arange(seq, device=query.device, dtype=tables.dtype)[:, None]
    of_blocks = torch.split(columns, BLOCK), torch.split(_by_table(query, n_tables), BLOCK, dim=2)
    blocks = CachedBlocks(tables, BLOCK)
    for block, (column, queries, n) in enumerate(zip(*of_blocks, n_keys, strict=True)):
        is_cached = blocks.cached_in(block)[:, : (block + 1) * BLOCK].byte()
        # After the keys of a shorter list come some that its queries do not see.
        listed = is_cached.argsort(dim=1, descending=True, stable=True)[:, :n]
        at = (starts + listed).flatten()
        gathered = (t.index_select(0, at).view(*listed.shape, *t.shape[1:]).transpose(1, 2) for t in by_key)
        is_visible = listed.to(tables.dtype)[:, None] <= column
        is_visible &= tables.gather(1, listed)[:, None] > column
        yield (queries, *gathered, is_visible[:, None]), at


def _by_table(values: Tensor, n_tables: int) -> Tensor:
    """Return [batch · table, heads of the table, ...] of [batch, head, ...]."""
    return values.reshape(len(values) * n_tables, -1, *values.shape[2:])


def _by_key(values: Tensor, n_tables: int) -> Tensor:
    """Return [batch · table · seq, heads of the table, dim] of [batch, head, seq, dim]."""
    return _by_table(values, n_tables).transpose(1, 2).flatten(0, 1)
