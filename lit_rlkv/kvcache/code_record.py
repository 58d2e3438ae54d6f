"""CodeRecord: what fixes the codes of a layer's quantized keys and values, by row and column."""

from collections.abc import Sequence

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from lit_rlkv.kvcache.feed import Feed


class CodeRecord:
    """The codes of all keys and values of one layer, evicted or not; the last column is scratch space."""

    def __init__(self, n_rows: int, seq_len: int) -> None:
        self.buffer: UInt8[Tensor, "row seq+1 kv_head byte"] | None = None
        """None before the first feed."""
        self.group = 1
        """Codes that share check bits, from the first feed on."""
        self._shape = n_rows, seq_len + 1

    @property
    def shape(self) -> tuple[int, int]:
        """KV heads, and bytes of a key and its value; after the first feed."""
        assert self.buffer is not None
        n_heads, n_bytes = self.buffer.shape[2:]
        return n_heads, n_bytes

    def write_feed(self, feed: Feed, record: UInt8[Tensor, "batch new kv_head byte"], group: int) -> None:
        """Write the record of given tokens to their columns."""
        self.group = group
        if self.buffer is None:
            self.buffer = record.new_zeros(*self._shape, *record.shape[2:])
        if feed.n_samples > 1:  # the first of them has read the earlier chunks
            before = self.buffer[feed.sources]
            self.buffer[feed.rows] = before.repeat_interleave(feed.n_samples, dim=0)
        columns = feed.columns.where(feed.is_token, self.buffer.shape[1] - 1)
        columns, record = (each.repeat_interleave(feed.n_samples, dim=0) for each in (columns, record))
        self._write(feed.rows, columns, record)

    def write(self, columns: Int[Tensor, " row"], record: UInt8[Tensor, "row 1 kv_head byte"]) -> None:
        """Write the record of one token for each row, in the given column of the row."""
        self._write(torch.arange(len(record), device=record.device), columns[:, None], record)

    def _write(self, rows: Tensor, columns: Tensor, record: Tensor) -> None:
        assert self.buffer is not None
        places = rows[:, None] * self.buffer.shape[1] + columns
        self.buffer.flatten(0, 1).index_copy_(0, places.flatten(), record.flatten(0, 1))

    def begin(self, rows: Sequence[int]) -> None:
        """Forget these rows, which start another sequence."""
        if self.buffer is not None:
            self.buffer[list(rows)] = 0

    def keep(self, rows: Int[Tensor, " kept"]) -> None:
        """Keep these rows alone, numbered anew in this order."""
        if self.buffer is not None:
            self.buffer = self.buffer[rows]

    def read(self, rows: Sequence[int]) -> UInt8[Tensor, "row kv_head byte seq"]:
        """Return a copy of these rows, after the first feed."""
        assert self.buffer is not None
        return self.buffer[list(rows), :-1].permute(0, 2, 3, 1)
