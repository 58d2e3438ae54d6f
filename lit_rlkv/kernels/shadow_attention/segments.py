"""Shadow attention in segments, by torch's flash attention: no masks, and any eviction table exactly.

The queries of a segment attend to the old keys, gathered once, and to each other in a causal triangle. The
parts are merged by their log-sum-exp, as in ring attention (arXiv:2310.01889), and so is the backward pass.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lit_rlkv.kernels.backend import in_autocast_dtype, on_tensor_device, register_operation
from lit_rlkv.kernels.shadow_attention.flash import LIBRARIES, Call
from lit_rlkv.kernels.shadow_attention.segment_plan import LayerSegments, Piece

INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor sink, Tensor queries, Tensor keys, Tensor query_starts, "
    "Tensor key_starts, Tensor pieces, int n_tables, float scaling"
)


@in_autocast_dtype
def segment_attention(
    query: Float[Tensor, "batch head seq dim"],
    key: Float[Tensor, "batch kv_head seq dim"],
    value: Float[Tensor, "batch kv_head seq dim_v"],
    segments: LayerSegments,
    scaling: float,
    sink: Float[Tensor, "*head"] | None = None,
) -> Float[Tensor, "batch head seq dim_v"]:
    """Return the definition's attention under the table that the segments were made from; see `flash.fits`.

    A batch of one row may be the flat tokens of a table with more rows.
    """
    sink = query.new_zeros(0) if sink is None else sink
    plan = (segments.queries, segments.keys, segments.query_starts, segments.key_starts, segments.pieces)
    out: Tensor = _forward(query, key, value, sink, *plan, segments.n_tables, scaling)[0]
    return out


class _Part(NamedTuple):
    """The keys that the queries of a piece attend to in one call of the library."""

    keys: Int[Tensor, " key"]
    """Units."""
    call: Call
    n_packed: int
    """Query heads of a KV head that are rows of the call."""


def _parts(
    n_packed: int,
    queries: Tensor,
    keys: Tensor,
    starts: tuple[Tensor, Tensor],
    pieces: Tensor,
    scaling: float,
) -> Iterator[tuple[Int[Tensor, " query"], list[_Part]]]:
    """Yield the units of the queries of each piece, and what they attend to; their own keys come first."""
    for piece in (Piece(*fields) for fields in pieces.tolist()):
        own = queries[piece.first_query : piece.end_query].long()
        gathered = keys[piece.first_key : piece.end_key].long()
        of_queries, of_keys = (each[piece.begin : piece.end + 1] - each[piece.begin] for each in starts)
        parts = []
        if piece.has_own:
            call = Call(of_queries, of_queries, piece.longest, piece.longest, 0, scaling)
            parts.append(_Part(own, call, 1))
        if piece.window:
            call = Call(of_queries, of_keys, piece.longest, piece.most_keys, piece.window, scaling)
            parts.append(_Part(gathered, call, 1))
        elif piece.most_keys:
            call = Call(
                of_queries * n_packed, of_keys, piece.longest * n_packed, piece.most_keys, None, scaling
            )
            parts.append(_Part(gathered, call, n_packed))
        yield own, parts


def _prepared(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, *others: Any) -> tuple[Any, ...]:
    """Return query, key and value by unit, a row of sinks for each table, and the parts."""
    queries, keys, *starts, pieces, n_tables, scaling = others
    width = max(query.shape[-1], value.shape[-1])  # the library has one for all three
    by_unit = [_by_unit(each, n_tables, width) for each in (query, key, value)]
    parts = _parts(query.shape[1] // key.shape[1], queries, keys, tuple(starts), pieces, scaling)
    return *by_unit, sink.to(_wide(query)).view(n_tables, sink.numel() // n_tables), parts


@on_tensor_device
def _run_forward(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, *others: Any) -> Any:
    q, k, v, sinks, pieces = _prepared(query, key, value, sink, *others)
    out, lse = q.new_zeros(*q.shape[:2], value.shape[-1]), q.new_zeros(q.shape[:2], dtype=sinks.dtype)
    for at, parts in pieces:
        found: list[tuple[Tensor, ...]] = []
        if sinks.numel():  # a key of value 0
            found.append((q.new_zeros(1, 1, 1), sinks[at % len(sinks)]))
        for part in parts:
            rows = _packed(q.index_select(0, at), part.n_packed)
            keys, values = (each.index_select(0, part.keys) for each in (k, v))
            results = LIBRARIES[q.device.type].forward(rows, keys, values, part.call)
            found.append(tuple(_unpacked(each, part.n_packed) for each in results))
        of_piece, lse[at] = _merged(found)
        out[at] = of_piece[..., : value.shape[-1]].to(out.dtype)
    return _by_head(out, query), lse


def _merged(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of the softmax over all parts, of which each has its own."""
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    return sum((out * (own - lse).exp()[..., None] for out, own in parts), lse.new_zeros(())), lse


@on_tensor_device
def _run_backward(d_out: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> Any:
    query, key, value, sink, *_ = inputs
    q, k, v, sinks, pieces = _prepared(*inputs)
    d_outs, outs = (_by_unit(each, len(sinks), q.shape[-1]) for each in (d_out, out))
    d_q = torch.zeros_like(q)
    # A key is in several parts: 16 bits would round each sum.
    d_k, d_v = (torch.zeros_like(each, dtype=lse.dtype) for each in (k, v))
    for at, parts in pieces:
        of_rows = []
        for part in parts:
            d_o, rows, o, its_lse = (
                _packed(each.index_select(0, at), part.n_packed) for each in (d_outs, q, outs, lse)
            )
            keys, values = (each.index_select(0, part.keys) for each in (k, v))
            # With the merged output and log-sum-exp these are the gradients under the softmax of all parts.
            of_queries, *of_keys = LIBRARIES[q.device.type].backward(
                d_o, rows, keys, values, o, its_lse, part.call
            )
            of_rows.append(_unpacked(of_queries, part.n_packed).to(lse.dtype))
            for total, gradient in zip((d_k, d_v), of_keys, strict=True):
                if part.keys is at:
                    total.index_add_(0, at, gradient.to(total.dtype))
                else:
                    total += _sums(gradient, part.keys, len(total))
        d_q[at] = sum(of_rows, lse.new_zeros(())).to(q.dtype)
    gradients = (
        _by_head(g[..., : x.shape[-1]].to(x.dtype), x) for g, x in ((d_q, query), (d_k, key), (d_v, value))
    )
    return *gradients, _of_sinks(sinks, d_outs, outs, lse).view(sink.shape).to(sink.dtype)


def _of_sinks(sinks: Tensor, d_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient to the sinks [table, head], of which there may be none."""
    heads = sinks.shape[1]
    delta = (d_out[:, :heads].to(lse.dtype) * out[:, :heads]).sum(-1)
    taken = (sinks.repeat(len(lse) // len(sinks), 1) - lse[:, :heads]).exp() * delta
    return -taken.view(-1, sinks.numel()).sum(0) if heads else sinks.clone()


def _sums(gradient: Float[Tensor, "key kv_head dim"], at: Int[Tensor, " key"], n_units: int) -> Tensor:
    """Return the sums [unit, kv_head, dim] over the gathered keys of each unit, without atomics."""
    ordered, order = at.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(n_units + 1, device=at.device))
    sums = F.embedding_bag(order, gradient.flatten(1), bounds, mode="sum", include_last_offset=True)
    return sums.view(n_units, *gradient.shape[1:])


def _packed(rows: Float[Tensor, "query head *dim"], n: int) -> Tensor:
    """Return [query · n, head / n, ...]: heads that see the same keys are rows."""
    return rows.view(len(rows), -1, n, *rows.shape[2:]).transpose(1, 2).flatten(0, 1)


def _unpacked(rows: Tensor, n: int) -> Tensor:
    """Return [query, head, ...]; the inverse of `_packed`."""
    return rows.view(-1, n, *rows.shape[1:]).transpose(1, 2).flatten(1, 2)


def _by_unit(values: Float[Tensor, "batch head seq dim"], n_tables: int, width: int) -> Tensor:
    """Return [unit, head of the table, width]."""
    if values.shape[-1] < width:
        values = F.pad(values, (0, width - values.shape[-1]))
    return values.transpose(1, 2).reshape(-1, values.shape[1] // n_tables, width)


def _by_head(values: Tensor, like: Tensor) -> Float[Tensor, "batch head seq dim"]:
    batch, n_heads, seq = like.shape[:3]
    return values.view(batch, seq, n_heads, values.shape[-1]).transpose(1, 2)


def _wide(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _empty_outputs(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    (batch, n_heads, seq, _), n_tables = query.shape, others[-2]
    out = value.new_empty(batch, seq, n_heads, value.shape[-1]).transpose(1, 2)
    return out, query.new_empty(batch * seq * n_tables, n_heads // n_tables, dtype=_wide(query))


def _empty_gradients(d_out: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    by_position = (t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in inputs[:3])
    return *by_position, torch.empty_like(inputs[3])


_forward = register_operation(
    "segment_attention_forward", f"({INPUTS}) -> (Tensor, Tensor)", _run_forward, _empty_outputs
)
_backward = register_operation(
    "segment_attention_backward",
    f"(Tensor d_out, Tensor out, Tensor lse, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _empty_gradients,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.n_tables, ctx.scaling = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])


@once_differentiable
def _gradients(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(d_out, *ctx.saved_tensors, ctx.n_tables, ctx.scaling), *(None,) * 7


torch.library.register_autograd("lit_rlkv::segment_attention_forward", _gradients, setup_context=_save)
