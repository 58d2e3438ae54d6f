"""Shadow attention in blocks, by torch's flash attention: what runs on CPUs, or without Triton.

Long sequences are cut into blocks of queries. Each block attends to the keys that are cached in it, gathered
from the sequence. Rows without evictions are causal and need no mask. Short sequences take the definition.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lit_rlkv.kernels.backend import in_autocast_dtype, with_unit_stride
from lit_rlkv.kernels.shadow_attention import reference
from lit_rlkv.kernels.shadow_attention.plan import MAX_WORK, CachedBlocks, SlotPlan

aten = torch.ops.aten
BLOCK = 64
"""Queries that share a list of keys."""
SHORT = 256
"""Length up to which the definition is as fast."""
LONG = 1024
"""Length from which lists of almost all keys are no slower than the definition, and take less memory."""


@in_autocast_dtype
@wraps(reference.shadow_attention)
def shadow_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    evicted_at: Tensor,
    scaling: float,
    *,
    softcap: float | None = None,
    plan: SlotPlan | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    is_plain = softcap is None and sink is None
    if is_plain and (ranges := _causal_ranges(evicted_at)) is not None:
        return _causal_attention(query, key, value, ranges, scaling)
    if (n_keys := _n_keys_of_blocks(evicted_at)) is None:
        return reference.shadow_attention(query, key, value, evicted_at, scaling, softcap=softcap, sink=sink)
    out: Tensor = _BlockAttention.apply(query, key, value, sink, evicted_at, n_keys, scaling, softcap)  # type: ignore[no-untyped-call]
    return out


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
    width = max(query.shape[-1], value.shape[-1])
    n_rows = len(query) if len(set(ranges)) == 1 else 1  # at a time
    outs = []
    for row in range(0, len(query), n_rows):
        begin, end = ranges[row]
        part = (t[row : row + n_rows, :, begin:end] for t in (query, key, value))
        # The library has no kernel for values of another width, and would compute the whole square.
        queries, keys, values = (_widened(t, width) for t in part)
        out = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scaling, enable_gqa=is_grouped
        )
        outs.append(F.pad(out[..., : value.shape[-1]], (0, 0, begin, seq - end)))
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
    """Attention of each block of queries to its keys, whose backward pass has the output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        evicted_at: Tensor,
        n_keys: list[int],
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        kernel = _kernel_of(query, scaling, softcap)
        outs, lses = [], []
        for block in _blocks(query, key, value, evicted_at, n_keys):
            out, lse = kernel.forward(block)
            outs.append(block.unpacked(out))
            lses.append(block.unpacked(lse))
        out, lse = (torch.cat(parts, dim=2).view(*query.shape[:3], -1) for parts in (outs, lses))
        if sink is not None:  # a key of value 0
            total = torch.logaddexp(lse, sink.to(lse.dtype).view(-1, 1, 1))
            out, lse = (out * (lse - total).exp()).to(out.dtype), total
        ctx.save_for_backward(query, key, value, sink, evicted_at, out, lse)
        ctx.kernel, ctx.n_keys = kernel, n_keys
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, evicted_at, out, lse = ctx.saved_tensors
        n_tables = evicted_at.shape[1]
        # Of a query that sees no key; the mask makes its probabilities 0.
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        of_queries = [_by_table(each, n_tables) for each in (with_unit_stride(d_out), out, lse)]
        d_query = []
        # A key is in several blocks: 16 bits would round each sum.
        d_key, d_value = (torch.zeros_like(_by_key(t, n_tables), dtype=lse.dtype) for t in (key, value))
        for block in _blocks(query, key, value, evicted_at, ctx.n_keys):
            of_query, *of_keys = ctx.kernel.backward(block, *(block.packed(each) for each in of_queries))
            d_query.append(block.unpacked(of_query))
            for total, part in zip((d_key, d_value), of_keys, strict=True):
                total.index_add_(0, block.at, part.transpose(1, 2).flatten(0, 1).to(total.dtype))
        of_keys = [
            total.view(-1, t.shape[2], *total.shape[1:]).transpose(1, 2).reshape(t.shape).to(t.dtype)
            for total, t in ((d_key, key), (d_value, value))
        ]
        d_sink = None
        if sink is not None:
            delta = (d_out.to(lse.dtype) * out).sum(-1, keepdim=True)
            taken = (sink.to(lse.dtype).view(-1, 1, 1) - lse).exp() * delta
            d_sink = -taken.sum(dim=(0, 2, 3)).view(sink.shape).to(sink.dtype)
        return torch.cat(d_query, dim=2).view(query.shape), *of_keys, d_sink, *(None,) * 4


@dataclass(frozen=True)
class _Block:
    """A block of queries with the keys that any of them sees; the queries of a KV head are its rows."""

    query: Float[Tensor, "table head row dim"]
    key: Float[Tensor, "table head key dim"]
    value: Float[Tensor, "table head key dim_v"]
    mask: Float[Tensor, "table 1 row key"]
    """0, and -inf for keys that a query does not see."""
    is_blind: Bool[Tensor, "table 1 row 1"]
    """True for queries that see no key."""
    queries: slice
    """Columns of the queries."""
    at: Int[Tensor, " place"]
    """Places of the keys in `_by_key`."""

    def packed(self, values: Tensor) -> Tensor:
        """Return the block's part of [table, head · group, seq, dim]: [table, head, group · query, dim]."""
        return _packed(values[:, :, self.queries], self.key.shape[1])

    def unpacked(self, values: Tensor) -> Tensor:
        """Return [table, head · group, query, dim]; the inverse of `packed`."""
        n_queries = self.queries.stop - self.queries.start
        return values.reshape(len(values), -1, n_queries, *values.shape[3:])


def _packed(values: Tensor, n_heads: int) -> Tensor:
    return values.reshape(len(values), n_heads, -1, *values.shape[3:])


@dataclass(frozen=True)
class _Library:
    """torch's flash attention on CPUs."""

    scaling: float

    def forward(self, block: _Block) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp [table, head, row, 1] of the queries."""
        wide = max(block.query.shape[-1], block.value.shape[-1])
        inputs = (_widened(each, wide) for each in (block.query, block.key, block.value))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *inputs, attn_mask=block.mask, scale=self.scaling
        )
        # The library has a log-sum-exp of 0 there.
        return out[..., : block.value.shape[-1]], lse[..., None].masked_fill(block.is_blind, -torch.inf)

    def backward(self, block: _Block, d_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients to query, key and value; with a sink they are those under all its logits."""
        wide = max(block.query.shape[-1], block.value.shape[-1])
        d_out, query, key, value, out = (
            _widened(each, wide) for each in (d_out, block.query, block.key, block.value, out)
        )
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, query, key, value, out, lse[..., 0], 0.0, False, attn_mask=block.mask, scale=self.scaling
        )
        own = (block.query, block.key, block.value)
        return tuple(each[..., : like.shape[-1]] for each, like in zip(found, own, strict=True))


@dataclass(frozen=True)
class _Plain:
    """The same in plain torch: for softcaps, which the library does not have, and devices other than CPUs."""

    scaling: float
    softcap: float | None

    def forward(self, block: _Block) -> tuple[Tensor, Tensor]:
        logits, _ = self._logits(block)
        lse = logits.logsumexp(-1, keepdim=True)
        probs = logits.sub_(lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
        return probs.to(block.value.dtype) @ block.value, lse

    def backward(self, block: _Block, d_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        d_out, query, key, value = (
            each.to(lse.dtype) for each in (d_out, block.query, block.key, block.value)
        )
        logits, slope = self._logits(block)
        probs = logits.sub_(lse).exp_()
        d_logits = (d_out @ value.mT - (d_out * out).sum(-1, keepdim=True)) * probs * self.scaling
        d_logits = d_logits if slope is None else d_logits * slope
        gradients = d_logits @ key, d_logits.mT @ query, probs.mT @ d_out
        return gradients[0].to(block.query.dtype), *gradients[1:]

    def _logits(self, block: _Block) -> tuple[Tensor, Tensor | None]:
        """Return masked logits in float32 or wider, and their slope by the logits before a softcap."""
        wide = torch.promote_types(block.query.dtype, torch.float32)
        logits, slope = block.query.to(wide) @ block.key.to(wide).mT * self.scaling, None
        if self.softcap is not None:
            share = torch.tanh(logits / self.softcap)
            logits, slope = self.softcap * share, 1 - share**2
        return logits + block.mask, slope


def _kernel_of(query: Tensor, scaling: float, softcap: float | None) -> _Library | _Plain:
    if query.device.type == "cpu" and softcap is None:
        return _Library(scaling)
    return _Plain(scaling, softcap)


def _widened(values: Tensor, width: int) -> Tensor:
    return F.pad(values, (0, width - values.shape[-1])) if values.shape[-1] < width else values


def _blocks(
    query: Tensor, key: Tensor, value: Tensor, evicted_at: Int[Tensor, "batch table seq"], n_keys: list[int]
) -> Iterator[_Block]:
    """Yield the blocks in the order of their queries, each with its keys gathered.

    A block's list of keys comes from the list before it, so that the work per block does not grow with `seq`.
    """
    n_tables, seq = evicted_at.shape[1:]
    queries, n_heads = _by_table(query, n_tables), key.shape[1] // n_tables
    by_key = [_by_key(t, n_tables) for t in (key, value)]
    tables = evicted_at.flatten(0, 1)
    starts = seq * torch.arange(len(tables), device=key.device)[:, None]
    listed = tables.new_empty((len(tables), 0), dtype=torch.long)
    for number, n in enumerate(n_keys):
        begin, end = number * BLOCK, min((number + 1) * BLOCK, seq)
        columns = torch.arange(begin, end, device=key.device)
        listed = torch.cat([listed, columns.expand(len(tables), -1)], dim=1)
        ends = tables.gather(1, listed)
        is_cached = ends > listed.clamp(min=begin)
        # After the keys of a shorter list come some that its queries do not see.
        order = is_cached.byte().argsort(dim=1, descending=True, stable=True)[:, :n]
        listed, ends = listed.gather(1, order), ends.gather(1, order)
        is_hidden = (listed[:, None] > columns[:, None]) | (ends[:, None] <= columns[:, None])
        mask = torch.zeros(is_hidden.shape, dtype=query.dtype, device=key.device)
        mask.masked_fill_(is_hidden, -torch.inf)
        packed = _packed(queries[:, :, begin:end], n_heads)
        group = packed.shape[2] // (end - begin)
        at = (starts + listed).flatten()
        keys, values = (t.index_select(0, at).view(*listed.shape, *t.shape[1:]) for t in by_key)
        yield _Block(
            packed,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            mask.repeat(1, group, 1)[:, None],
            is_hidden.all(dim=-1).repeat(1, group)[:, None, :, None],
            slice(begin, end),
            at,
        )


def _by_table(values: Tensor, n_tables: int) -> Tensor:
    """Return [batch · table, heads of the table, ...] of [batch, head, ...]."""
    return values.reshape(len(values) * n_tables, -1, *values.shape[2:])


def _by_key(values: Tensor, n_tables: int) -> Tensor:
    """Return [batch · table · seq, heads of the table, dim] of [batch, head, seq, dim]."""
    return _by_table(values, n_tables).transpose(1, 2).flatten(0, 1)
