"""SegmentPlan: sequences for a library's attention, which replay any eviction table without a mask.

A row is cut where a key is evicted and where a KV head begins or ceases to cache keys. Between two cuts all
queries of a KV head see the same old keys, those that were cached before the first of them, and their own in
a causal triangle.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.kernels.shadow_attention.flash import LIBRARIES

MIN_QUERIES = 16
"""Mean length of segments below which they cost more than lists of keys."""
MAX_OLD = 64
"""Old keys of all segments, for each key of the batch, above which gathering them takes too long."""
MIN_PIECE = 2**17
"""Queries and gathered keys that are computed at a time; as many as the batch has keys if those are more."""
MAX_SEQUENCES = 65535
"""Sequences in a call: what CUDA allows on the second axis of a grid."""


class Piece(NamedTuple):
    """Sequences begin to end that are computed at once, of one kind and of similar lengths."""

    begin: int
    end: int
    first_query: int
    end_query: int
    first_key: int
    end_key: int
    longest: int
    """Most queries of a sequence."""
    most_keys: int
    """Most gathered keys of a sequence."""
    has_own: int
    """1 if queries see each other, causally, beside the gathered keys."""
    window: int
    """Keys that a query sees up to its own, which for the last query is the last; 0: all gathered keys."""


@dataclass(frozen=True)
class LayerSegments:
    """The sequences of one layer. A unit is a token and KV head of the table: token · n_tables + head."""

    n_tables: int
    """KV heads of the table; 1 if it serves all."""
    queries: Int[Tensor, " query"]
    """Units of the queries, sequence by sequence."""
    keys: Int[Tensor, " key"]
    """Units of the gathered keys: a window's with the queries' own, else the old ones."""
    query_starts: Int[Tensor, " sequence_and_end"]
    key_starts: Int[Tensor, " sequence_and_end"]
    pieces: Int[Tensor, "piece field"]
    """Rows of `Piece`, on the host."""


@dataclass(frozen=True)
class SegmentPlan:
    """The segments of all layers; only for the eviction table, and the tokens, that they were made from."""

    layers: tuple[LayerSegments | None, ...]
    """None for a sliding window where the library has none."""

    def layer(self, index: int, n_kv_heads: int) -> LayerSegments | None:
        """Return the segments of one layer; None if it has none, or fewer KV heads than the table."""
        found = self.layers[index if len(self.layers) > 1 else 0]
        return found if found is not None and found.n_tables in (1, n_kv_heads) else None


def plan_segments(
    evicted_at: Int[Tensor, "batch layer kv_head seq"],
    place: Int[Tensor, "batch seq"] | None = None,
    cells: Int[Tensor, " token"] | None = None,
) -> SegmentPlan | None:
    """Return the segments of a whole eviction table. The host waits for the device once.

    None if the segments of a layer are shorter than `MIN_QUERIES` in the mean, or their old keys too many.

    Args:
        place: token of each cell of the batch if it is a flat sequence of tokens; None: its own number.
        cells: cells of the batch whose queries are computed, one for each token; None: all.
    """
    (batch, _, n_heads, seq), device = evicted_at.shape, evicted_at.device
    n_cells = batch * seq
    if not evicted_at.numel():
        return None
    most = n_cells // MIN_QUERIES
    is_query = torch.full((n_cells,), cells is None, device=device)
    if cells is not None:
        is_query[cells] = True
    tokens = torch.arange(n_cells, device=device) if place is None else place.flatten()
    n_keys = n_heads * (n_cells if cells is None else len(cells))
    cuts = [_cut(layer, is_query.view(batch, seq), most) for layer in evicted_at.unbind(1)]
    layers: list[LayerSegments | None] = []
    for cut, facts in zip(cuts, torch.stack([cut.facts for cut in cuts]).long().cpu(), strict=True):
        n_cuts, window = facts[0, :2].tolist()
        n_old = (facts[1 : n_cuts + 1, 2:] >> 1).sum()
        if n_cuts > most or (not window and n_old > MAX_OLD * n_keys):
            return None
        has_kernel = not window or LIBRARIES[device.type].has_windows
        segments = facts[1 : n_cuts + 1]
        layers.append(_layer(cut, segments, window, tokens, max(MIN_PIECE, n_keys)) if has_kernel else None)
    return SegmentPlan(tuple(layers))


class _Cuts(NamedTuple):
    """The cuts of one layer's table."""

    is_cached: Bool[Tensor, "batch head seq"]
    ends: Int[Tensor, "batch head seq"]
    """First column that no longer sees each key."""
    number: Int[Tensor, " cell_and_end"]
    """Segment of each cell."""
    facts: Int[Tensor, "segment_after_header field"]
    """Number of segments and window; then for each segment its first cell, 2 · length + 1 if it has queries,
    and for each head 2 · old keys + 1 if it caches its own."""


def _cut(evicted_at: Int[Tensor, "batch head seq"], is_query: Bool[Tensor, "batch seq"], most: int) -> _Cuts:
    """Cut a table into at most so many segments, on the device."""
    batch, n_heads, seq = evicted_at.shape
    column = torch.arange(seq, device=evicted_at.device)
    cell = torch.arange(batch * seq, device=evicted_at.device)
    is_cached = evicted_at > column
    ends = evicted_at.clamp(max=seq).long().where(is_cached, seq)
    deaths = cell.new_zeros(batch, n_heads, seq + 1).scatter_add_(2, ends, is_cached.long())
    n_old = is_cached.cumsum(2) - is_cached.long() - deaths.cumsum(2)[..., :seq]
    window = _sliding_window(evicted_at, is_cached)
    is_cut = (deaths[..., :seq].sum(1) > 0) & (window == 0)
    is_cut[:, 1:] |= (is_cached[..., 1:] != is_cached[..., :-1]).any(1)
    is_cut[:, 1:] |= is_query[:, 1:] != is_query[:, :-1]
    is_cut[:, 0] = True
    here_or_later = column.where(is_cut, seq).flip(1).cummin(1).values.flip(1)
    length = F.pad(here_or_later[:, 1:], (0, 1), value=seq) - column
    n_cuts = is_cut.flatten().cumsum(0)
    place = (n_cuts - 1).where(is_cut.flatten(), most).clamp(max=most)
    first = cell.new_zeros(most + 1).scatter_(0, place, cell)[:most]
    of_heads = (2 * n_old + is_cached).transpose(1, 2).flatten(0, 1)
    of_cells = torch.cat([torch.stack([cell, (2 * length + is_query).flatten()], dim=1), of_heads], dim=1)
    header = torch.stack([n_cuts[-1], window]).repeat(1 + n_heads)[None, : 2 + n_heads]
    facts = torch.cat([header, of_cells[first]]).int()
    return _Cuts(is_cached, ends.int(), torch.cat([n_cuts - 1, n_cuts[-1:]]), facts)


def _sliding_window(
    evicted_at: Int[Tensor, "batch head seq"], is_cached: Bool[Tensor, "batch head seq"]
) -> Int[Tensor, ""]:
    """Return n if all keys are evicted n columns after their own, or at the end of their row; 0 if not so."""
    seq = evicted_at.shape[-1]
    column = torch.arange(seq, device=evicted_at.device)
    ends = evicted_at.clamp(max=seq)
    window = (ends - column).masked_fill(~is_cached, 0).amax().long()
    last = (is_cached * (column + 1)).amax(-1, keepdim=True)
    n_cached = is_cached.sum(-1, keepdim=True)
    fits = (is_cached == ((column >= last - n_cached) & (column < last))).all() & (window < n_cached.amax())
    return window * (fits & ((ends == (column + window).minimum(last)) | ~is_cached).all())


def _layer(
    cuts: _Cuts,
    segments: Int[Tensor, "segment field"],
    window: int,
    tokens: Int[Tensor, " cell"],
    at_once: int,
) -> LayerSegments:
    """Return the sequences of a layer: its segments, on the host here, for each KV head that sees a key."""
    has_queries, n_old, has_own = segments[:, 1:2] & 1, segments[:, 2:] >> 1, segments[:, 2:] & 1
    n_heads, length = n_old.shape[1], (segments[:, 1:2] >> 1).expand_as(n_old)
    is_sequence = (has_queries * (n_old + has_own) > 0).flatten()
    n_keys = n_old + length * has_own if window else n_old
    has_own = torch.zeros_like(has_own) if window else has_own
    kind = _kind(has_own, length, n_keys)
    key = ((kind << 50) + (length << 25) + n_keys).flatten().masked_fill(~is_sequence, 2**63 - 1)
    order = key.argsort(stable=True)[: int(is_sequence.sum())]
    rank = torch.full(is_sequence.shape, len(order)).scatter_(0, order, torch.arange(len(order)))
    length, n_keys, has_own = (each.flatten()[order] for each in (length, n_keys, has_own))
    starts = [F.pad(each.cumsum(0), (1, 0)) for each in (length, n_keys)]
    pieces = _pieces(length, n_keys, has_own, starts, window, at_once)
    sent = torch.stack([segments[order // n_heads, 0], order % n_heads, length, n_keys])
    first, head, length, n_keys = _sent(sent, tokens.device)
    of_query, cell = _ranges(first, length, int(starts[0][-1]))
    queries = tokens[cell] * n_heads + head[of_query]
    if window:
        of_key, cell = _ranges(first + length - n_keys, n_keys, int(starts[1][-1]))
        keys = tokens[cell] * n_heads + head[of_key]
    else:
        keys = _old_keys(cuts, _sent(rank, tokens.device), int(n_old.sum()), tokens)[: int(starts[1][-1])]
    of_queries, of_keys = _sent(torch.stack(starts).int(), tokens.device)
    return LayerSegments(n_heads, queries.int(), keys.int(), of_queries, of_keys, pieces)


def _kind(has_own: Tensor, length: Tensor, n_keys: Tensor) -> Tensor:
    """Return equal numbers for sequences of one kind, each at most twice as long as any other."""
    n_bits = (torch.frexp(each.double()).exponent.long() for each in (length, n_keys))
    return (has_own << 12) + (next(n_bits) << 6) + next(n_bits)


def _pieces(
    length: Tensor, n_keys: Tensor, has_own: Tensor, starts: list[Tensor], window: int, at_once: int
) -> Int[Tensor, "piece field"]:
    """Divide sequences that are in the order of their kinds; programs beyond the end of one are idle."""
    number, n_units = torch.arange(len(length)), (starts[0] + starts[1])[1:]
    call = torch.stack([_kind(has_own, length, n_keys), n_units // at_once, number // MAX_SEQUENCES], dim=1)
    pieces, begin = list[int](), 0
    for end in accumulate(torch.unique_consecutive(call, dim=0, return_counts=True)[1].tolist()):
        bounds = (int(each[i]) for each in starts for i in (begin, end))
        most = (int(each[begin:end].max()) for each in (length, n_keys, has_own))
        pieces += [begin, end, *bounds, *most, window]
        begin = end
    return torch.tensor(pieces, dtype=torch.long).view(-1, len(Piece._fields))


def _old_keys(
    cuts: _Cuts, rank: Int[Tensor, " list"], n_old: int, tokens: Int[Tensor, " cell"]
) -> Int[Tensor, " key"]:
    """Return the units of the old keys, sequence by sequence and in the order of columns.

    A key is old in the segments after its own, up to the one that begins at its eviction.

    Args:
        rank: sequence of each segment and head; what is none of them comes last.
        n_old: old keys of all segments and heads.
    """
    batch, n_heads, seq = cuts.is_cached.shape
    row, head = (torch.arange(n, device=tokens.device)[:, None] for n in (batch, n_heads))
    own = cuts.number[:-1].view(batch, 1, seq)
    n_lists = (cuts.number[row[..., None] * seq + cuts.ends] - own - 1).where(cuts.is_cached, 0)
    of_entry, segment = _ranges((own + 1).expand_as(n_lists).flatten(), n_lists.flatten(), n_old)
    lists = rank[segment * n_heads + head.expand(batch, -1, seq).flatten()[of_entry]]
    units = (tokens.view(batch, 1, seq) * n_heads + head).flatten()
    return units[of_entry[lists.argsort(stable=True)]]


def _ranges(begin: Tensor, length: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return for begin, begin + 1, ... of each range the number of its range, and itself."""
    number = torch.repeat_interleave(length, output_size=total)
    return number, (begin - length.cumsum(0) + length)[number] + torch.arange(total, device=length.device)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Return the values on the device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
