"""Shadow attention in segments, by torch's flash attention: no masks, and any eviction table exactly.

The queries of a segment attend to the old keys, gathered once, and to each other in a causal triangle. The
parts are merged by their log-sum-exp, as in ring attention (arXiv:2310.01889), and so is the backward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lit_rlkv.kernels.backend import in_autocast_dtype, on_tensor_device, register_operation
from lit_rlkv.kernels.shadow_attention.flash import LIBRARIES, Call, Library
from lit_rlkv.kernels.shadow_attention.segment_plan import LayerSegments, Piece

INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sink, Tensor queries, Tensor keys, Tensor query_starts, "
    "Tensor key_starts, Tensor pieces"
)
SETTINGS = "int n_tables, float scaling"


@in_autocast_dtype
def segment_attention(
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head seq dim"],
    value: Float[Tensor, "batch kv_head seq dim_v"],
    segments: LayerSegments,
    scaling: float,
    sink: Float[Tensor, "*head"] | None = None,
) -> Float[Tensor, "batch head seq dim_v"]:
    """Return the definition's attention under the table that the segments were made from; see `fits`.

    A batch of one row may be the flat tokens of a table with more rows. The output is laid out as
    [batch seq head dim_v].
    """
    plan = (segments.queries, segments.keys, segments.query_starts, segments.key_starts, segments.pieces)
    out: Tensor = _forward(query, key, value, sink, *plan, segments.n_tables, scaling)[0]
    return out


@dataclass(frozen=True)
class _Part:
    """What the queries of a piece attend to in one call of the library."""

    keys: Int[Tensor, " key"]
    """Units of the keys."""
    call: Call
    is_own: bool
    """True if the keys are the queries' own."""

    def packed(self, rows: Float[Tensor, "query head *dim"], n_kv_heads: int) -> Tensor:
        """Return [query, head, ...], or where all see the same keys [query · group, kv_head, ...]."""
        if self.call.is_causal:
            return rows
        return rows.unflatten(1, (n_kv_heads, -1)).transpose(1, 2).flatten(0, 1)

    def unpacked(self, rows: Tensor, n_queries: int) -> Tensor:
        """Return [query, head, ...]; the inverse of `packed`."""
        if self.call.is_causal:
            return rows
        return rows.unflatten(0, (n_queries, -1)).transpose(1, 2).flatten(1, 2)


@dataclass(frozen=True)
class _Layer:
    """The inputs of an attention, by unit, and its pieces."""

    query: Float[Tensor, "unit head dim"]
    key: Float[Tensor, "unit kv_head dim"]
    value: Float[Tensor, "unit kv_head dim"]
    sink: Float[Tensor, "table head"] | None
    plan: tuple[Tensor, ...]
    n_tables: int
    scaling: float

    @property
    def library(self) -> Library:
        return LIBRARIES[self.query.device.type]

    def sinks_of(self, units: Int[Tensor, " query"]) -> Tensor:
        assert self.sink is not None
        return self.sink[units % self.n_tables]

    def pieces(self) -> Iterator[tuple[Int[Tensor, " query"], list[_Part]]]:
        """Yield the units of the queries of each piece, and what they attend to."""
        queries, keys, query_starts, key_starts, pieces = self.plan
        group = self.query.shape[1] // self.key.shape[1]
        for piece in (Piece(*fields) for fields in pieces.tolist()):
            own = queries[piece.first_query : piece.end_query].long()
            gathered = keys[piece.first_key : piece.end_key].long()
            of_queries, of_keys = (
                starts[piece.begin : piece.end + 1] - starts[piece.begin]
                for starts in (query_starts, key_starts)
            )
            parts = []
            if piece.has_own:
                call = Call(of_queries, of_queries, piece.longest, piece.longest, True, 0, self.scaling)
                parts.append(_Part(own, call, is_own=True))
            if piece.window:
                sizes = piece.longest, piece.most_keys
                call = Call(of_queries, of_keys, *sizes, True, piece.window, self.scaling)
                parts.append(_Part(gathered, call, is_own=False))
            elif piece.most_keys:
                sizes = piece.longest * group, piece.most_keys
                call = Call(of_queries * group, of_keys, *sizes, False, 0, self.scaling)
                parts.append(_Part(gathered, call, is_own=False))
            yield own, parts


def _layer(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *others: Any) -> _Layer:
    *plan, n_tables, scaling = others
    width = max(query.shape[-1], value.shape[-1])  # the library's kernels have one for all three
    inputs = [_by_unit(_widened(each, width), n_tables) for each in (query, key, value)]
    wide = torch.promote_types(query.dtype, torch.float32)
    sinks = None if sink is None else sink.to(wide).view(n_tables, -1)
    return _Layer(*inputs, sinks, tuple(plan), n_tables, scaling)


@on_tensor_device
def _run_forward(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *others: Any) -> Any:
    layer = _layer(query, key, value, sink, *others)
    wide = torch.promote_types(query.dtype, torch.float32)
    out = layer.query.new_zeros(*layer.query.shape[:2], value.shape[-1])
    lse = layer.query.new_zeros(layer.query.shape[:2], dtype=wide)
    for at, parts in layer.pieces():
        rows = layer.query.index_select(0, at)
        merged: tuple[Tensor, Tensor] | None = None
        for part in parts:
            keys, values = (each.index_select(0, part.keys) for each in (layer.key, layer.value))
            found = layer.library.forward(part.packed(rows, keys.shape[1]), keys, values, part.call)
            of_part, its_lse = (part.unpacked(each, len(rows)) for each in found)
            merged = _merged(merged, of_part.to(wide), its_lse)
        assert merged is not None
        of_piece, its_lse = merged
        if layer.sink is not None:  # a key of value 0
            total = torch.logaddexp(its_lse, layer.sinks_of(at))
            of_piece, its_lse = of_piece * (its_lse - total).exp()[..., None], total
        out.index_copy_(0, at, of_piece[..., : value.shape[-1]].to(out.dtype))
        lse.index_copy_(0, at, its_lse)
    return _by_head(out, query), lse


def _merged(before: tuple[Tensor, Tensor] | None, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax over what was seen before and a further part."""
    if before is None:
        return out, lse
    total = torch.logaddexp(before[1], lse)
    shares = ((each - total).exp()[..., None] for each in (before[1], lse))
    return before[0] * next(shares) + out * next(shares), total


@on_tensor_device
def _run_backward(
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    *others: Any,
) -> Any:
    layer = _layer(query, key, value, sink, *others)
    d_outs, outs = (_by_unit(_widened(t, layer.query.shape[-1]), layer.n_tables) for t in (d_out, out))
    d_query = torch.zeros_like(layer.query)
    # A key is in several parts: 16 bits would round each sum.
    d_key, d_value = (torch.zeros_like(each, dtype=lse.dtype) for each in (layer.key, layer.value))
    for at, parts in layer.pieces():
        of_queries = [each.index_select(0, at) for each in (d_outs, layer.query, outs, lse)]
        of_piece = torch.zeros_like(of_queries[1], dtype=lse.dtype)
        for part in parts:
            keys, values = (each.index_select(0, part.keys) for each in (layer.key, layer.value))
            upstream, rows, merged, its_lse = (part.packed(each, keys.shape[1]) for each in of_queries)
            # With the merged output and log-sum-exp these are the gradients under the softmax of all parts.
            of_rows, *of_keys = layer.library.backward(
                upstream, rows, keys, values, merged, its_lse, part.call
            )
            of_piece += part.unpacked(of_rows, len(at))
            for total, gradient in zip((d_key, d_value), of_keys, strict=True):
                if part.is_own:
                    total.index_add_(0, part.keys, gradient.to(total.dtype))
                else:
                    total += _sums(gradient, part.keys, len(total))
        d_query.index_copy_(0, at, of_piece.to(d_query.dtype))
    d_sink = None
    if layer.sink is not None and sink is not None:
        delta = (d_outs.to(lse.dtype) * outs).sum(-1).unflatten(0, (-1, layer.n_tables))
        taken = (layer.sink - lse.unflatten(0, (-1, layer.n_tables))).exp() * delta
        d_sink = -taken.sum(0).view(sink.shape).to(sink.dtype)
    found = ((d_query, query), (d_key, key), (d_value, value))
    gradients = [_by_head(each[..., : like.shape[-1]].to(like.dtype), like) for each, like in found]
    return *gradients, query.new_zeros(0) if d_sink is None else d_sink


def _sums(gradient: Float[Tensor, "key kv_head dim"], at: Int[Tensor, " key"], n_units: int) -> Tensor:
    """Return the sums [unit, kv_head, dim] of the gathered keys of each unit, in float32, without atomics."""
    ordered, order = at.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(n_units + 1, device=at.device))
    sums = F.embedding_bag(order, gradient.flatten(1), bounds, mode="sum", include_last_offset=True)
    return sums.view(n_units, *gradient.shape[1:])


def _by_unit(
    values: Float[Tensor, "batch head seq dim"], n_tables: int
) -> Float[Tensor, "unit head_of_table dim"]:
    by_position = values.transpose(1, 2)
    return by_position.reshape(-1, values.shape[1] // n_tables, values.shape[-1])


def _by_head(
    values: Float[Tensor, "unit head_of_table dim"], like: Tensor
) -> Float[Tensor, "batch head seq dim"]:
    batch, n_heads, seq = like.shape[:3]
    return values.view(batch, seq, n_heads, values.shape[-1]).transpose(1, 2)


def _widened(values: Tensor, width: int) -> Tensor:
    return F.pad(values, (0, width - values.shape[-1])) if values.shape[-1] < width else values


def _empty_outputs(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    (batch, n_heads, seq, _), n_tables = query.shape, others[-2]
    lse = query.new_empty(
        batch * seq * n_tables, n_heads // n_tables, dtype=torch.promote_types(query.dtype, torch.float32)
    )
    return value.new_empty(batch, seq, n_heads, value.shape[-1]).transpose(1, 2), lse


def _empty_gradients(
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    by_position = [t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in (query, key, value)]
    return *by_position, query.new_empty(0) if sink is None else torch.empty_like(sink)


_forward = register_operation(
    "segment_attention_forward", f"({INPUTS}, {SETTINGS}) -> (Tensor, Tensor)", _run_forward, _empty_outputs
)
_backward = register_operation(
    "segment_attention_backward",
    f"(Tensor d_out, Tensor out, Tensor lse, {INPUTS}, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _empty_gradients,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.n_tables, ctx.scaling = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.has_sink = inputs[3] is not None
    ctx.mark_non_differentiable(output[1])


@once_differentiable
def _gradients(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *gradients, d_sink = _backward(d_out, *ctx.saved_tensors, ctx.n_tables, ctx.scaling)
    return *gradients, d_sink if ctx.has_sink else None, *(None,) * 7


torch.library.register_autograd("lit_rlkv::segment_attention_forward", _gradients, setup_context=_save)
