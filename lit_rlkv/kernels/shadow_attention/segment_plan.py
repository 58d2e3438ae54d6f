"""SegmentPlan: sequences for a library's attention, which replay any eviction table without a mask.

A row is cut where a key is evicted and where a KV head begins or ceases to cache keys. Between two cuts all
queries of a KV head see the same old keys, those that were cached before the first of them, and their own in
a causal triangle.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

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
    """Sequences that are computed at once, of one kind and of similar lengths; each is of one KV head."""

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
    has_own: bool
    """True if queries see each other, causally, beside the gathered keys."""
    window: int
    """Keys that a query sees at most, the last of the gathered ones being its own; 0: all gathered keys."""


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
    if not evicted_at.numel():
        return None
    n_cells = batch * seq
    most = n_cells // MIN_QUERIES
    is_query = torch.full((n_cells,), cells is None, device=device)
    if cells is not None:
        is_query[cells] = True
    places = torch.arange(n_cells, device=device) if place is None else place.flatten()
    n_keys = n_heads * (n_cells if cells is None else len(cells))
    cuts = [_Cuts(layer, is_query.view(batch, seq), most) for layer in evicted_at.unbind(1)]
    layers: list[LayerSegments | None] = []
    for cut, facts in zip(cuts, torch.stack([cut.facts for cut in cuts]).cpu(), strict=True):
        n_cuts, window = facts[0, :2].tolist()
        if n_cuts > most:
            return None
        if window and not LIBRARIES[device.type].has_windows:
            layers.append(None)
            continue
        sequences = _sequences(facts[1 : n_cuts + 1].long(), window, max(MIN_PIECE, n_keys))
        if not window and sequences.n_old > MAX_OLD * n_keys:
            return None
        layers.append(_layer(cut, sequences, places))
    return SegmentPlan(tuple(layers))


class _Cuts:
    """The cuts of one layer's table, and for the host the facts about each segment."""

    def __init__(
        self, evicted_at: Int[Tensor, "batch head seq"], is_query: Bool[Tensor, "batch seq"], most: int
    ):
        batch, n_heads, seq = evicted_at.shape
        column = torch.arange(seq, device=evicted_at.device)
        self.is_cached = evicted_at > column
        self.ends = evicted_at.clamp(max=seq).long().where(self.is_cached, seq)
        deaths = torch.zeros(batch, n_heads, seq + 1, dtype=torch.long, device=column.device)
        deaths.scatter_add_(2, self.ends, self.is_cached.long())
        n_old = self.is_cached.cumsum(2) - self.is_cached.long() - deaths.cumsum(2)[..., :seq]
        window = sliding_window(evicted_at, self.is_cached)
        is_cut = (deaths[..., :seq].sum(1) > 0) & (window == 0)
        is_cut[:, 1:] |= (self.is_cached[..., 1:] != self.is_cached[..., :-1]).any(1)
        is_cut[:, 1:] |= is_query[:, 1:] != is_query[:, :-1]
        is_cut[:, 0] = True
        following = column.where(is_cut, seq).flip(1).cummin(1).values.flip(1)  # at this column or later
        following = torch.cat([following[:, 1:], following.new_full((batch, 1), seq)], dim=1)
        number = is_cut.flatten().cumsum(0)
        self.number = torch.cat([number - 1, number[-1:]])
        """Segment of each cell; one more entry, for the end of the last row."""
        starts = number.new_zeros(most + 1)
        starts.scatter_(
            0,
            (number - 1).where(is_cut.flatten(), most).clamp(max=most),
            torch.arange(batch * seq, device=column.device),
        )
        of_cells = [
            torch.arange(batch * seq, device=column.device)[:, None],
            (2 * (following - column) + is_query).flatten()[:, None],
            (2 * n_old + self.is_cached).transpose(1, 2).flatten(0, 1),
        ]
        header = torch.stack([number[-1], window, *[window] * n_heads])
        self.facts = torch.cat([header[None], torch.cat(of_cells, dim=1)[starts[:most]]]).int()
        """Number of segments and window; then for each segment its first cell, 2 · length + 1 if it has
        queries, and for each head 2 · old keys + 1 if it caches its own."""


def sliding_window(
    evicted_at: Int[Tensor, "batch head seq"], is_cached: Bool[Tensor, "batch head seq"]
) -> Int[Tensor, ""]:
    """Return n if all keys are evicted n columns after their own, or at the end of their row; 0 if not so."""
    seq = evicted_at.shape[-1]
    column = torch.arange(seq, device=evicted_at.device)
    ends = evicted_at.clamp(max=seq)
    window = (ends - column).masked_fill(~is_cached, 0).amax().long()
    last = (is_cached * (column + 1)).amax(-1, keepdim=True)
    n_cached = is_cached.sum(-1, keepdim=True)
    fits = (is_cached == ((column >= last - n_cached) & (column < last))).all()
    fits &= ((ends == (column + window).minimum(last)) | ~is_cached).all() & (window < n_cached.amax())
    return window * fits


@dataclass(frozen=True)
class _Sequences:
    """The sequences of a layer on the host, in the order of its pieces."""

    start: Int[Tensor, " sequence"]
    """First cell."""
    head: Int[Tensor, " sequence"]
    length: Int[Tensor, " sequence"]
    n_keys: Int[Tensor, " sequence"]
    """Gathered keys."""
    rank: Int[Tensor, " list"]
    """Sequence of each segment and head, or how many there are if it is none of them."""
    n_old: int
    """Old keys of all segments and heads."""
    pieces: list[Piece]


def _sequences(facts: Int[Tensor, "segment field"], window: int, most_at_once: int) -> _Sequences:
    length, has_queries = facts[:, 1:2] >> 1, (facts[:, 1:2] & 1).bool()
    n_old, has_own = facts[:, 2:] >> 1, facts[:, 2:] & 1
    is_seeing = has_queries & (n_old + has_own > 0)
    length = length.expand_as(n_old)
    n_keys = n_old + length * has_own if window else n_old
    has_own = torch.zeros_like(has_own) if window else has_own
    # Sequences of one call are similar, because programs beyond the length of theirs are idle.
    kind = (has_own << 12) + (_n_bits(length) << 6) + _n_bits(n_keys)
    order = ((kind << 50) + (length << 25) + n_keys).flatten()
    order = order.masked_fill(~is_seeing.flatten(), torch.iinfo(torch.long).max)
    order = order.argsort(stable=True)[: int(is_seeing.sum())]
    rank = torch.full((n_old.numel(),), len(order)).scatter_(0, order, torch.arange(len(order)))
    length, n_keys, has_own, kind = (each.flatten()[order] for each in (length, n_keys, has_own, kind))
    query_ends, key_ends = length.cumsum(0), n_keys.cumsum(0)
    call = torch.stack(
        [kind, (query_ends + key_ends) // most_at_once, torch.arange(len(order)) // MAX_SEQUENCES], dim=1
    )
    _, sizes = call.unique_consecutive(dim=0, return_counts=True)
    pieces, begin = [], 0
    for size in sizes.tolist():
        end = begin + size
        of_queries, of_keys = (
            (int(ends[begin - 1]) if begin else 0, int(ends[end - 1])) for ends in (query_ends, key_ends)
        )
        most = int(length[begin:end].max()), int(n_keys[begin:end].max())
        pieces.append(Piece(begin, end, *of_queries, *of_keys, *most, bool(has_own[begin]), window))
        begin = end
    segment, head = order // n_old.shape[1], order % n_old.shape[1]
    return _Sequences(facts[segment, 0], head, length, n_keys, rank, int(n_old.sum()), pieces)


def _n_bits(numbers: Tensor) -> Tensor:
    return torch.frexp(numbers.double()).exponent.long()


def _layer(cuts: _Cuts, of_host: _Sequences, place: Int[Tensor, " cell"]) -> LayerSegments:
    """Return a layer's sequences on the device."""
    n_tables, device = cuts.is_cached.shape[1], place.device
    start, head, length, n_keys = _sent(
        torch.stack([of_host.start, of_host.head, of_host.length, of_host.n_keys]), device
    )
    last = of_host.pieces[-1] if of_host.pieces else Piece(*[0] * len(Piece._fields))
    of_query, cell = _ranges(start, length, last.end_query)
    queries = place[cell] * n_tables + head[of_query]
    if last.window:
        of_key, cell = _ranges(start + length - n_keys, n_keys, last.end_key)
        keys = place[cell] * n_tables + head[of_key]
    else:
        keys = _old_keys(cuts, of_host, place)[: last.end_key]
    starts = (torch.cat([each.new_zeros(1), each.cumsum(0)]).int() for each in (length, n_keys))
    pieces = torch.tensor(of_host.pieces, dtype=torch.long).view(-1, len(Piece._fields))
    return LayerSegments(n_tables, queries.int(), keys.int(), *starts, pieces)


def _old_keys(cuts: _Cuts, of_host: _Sequences, place: Int[Tensor, " cell"]) -> Int[Tensor, " key"]:
    """Return the units of the old keys, sequence by sequence and in the order of columns.

    A key is old in the segments after its own, up to the one that begins at its eviction.
    """
    batch, n_tables, seq = cuts.is_cached.shape
    row, head = (torch.arange(n, device=place.device)[:, None] for n in (batch, n_tables))
    own = cuts.number[:-1].view(batch, 1, seq).expand_as(cuts.ends)
    n_lists = (cuts.number[row[..., None] * seq + cuts.ends] - own - 1).where(cuts.is_cached, 0).flatten()
    of_entry, segment = _ranges((own + 1).flatten(), n_lists, of_host.n_old)
    list_of = segment * n_tables + head.expand(batch, -1, seq).flatten()[of_entry]
    order = _sent(of_host.rank, place.device)[list_of].argsort(stable=True)
    units = place.view(batch, 1, seq) * n_tables + head
    return units.flatten()[of_entry[order]]


def _ranges(begin: Tensor, length: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return begin, begin + 1, ... of each range, and before it the number of the range of each."""
    number = torch.repeat_interleave(length, output_size=total)
    first = length.cumsum(0) - length
    return number, (begin - first)[number] + torch.arange(total, device=length.device)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Return the values on the device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
