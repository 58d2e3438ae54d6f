"""Recorders: what a decoder records beside the tokens, one recorder for each part of a `Record`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lit_rlkv.kvcache import SlotCache
from lit_rlkv.rollout.sampling import Kept
from lit_rlkv.types import NEVER, Codes, times_dtype

HOST = torch.device("cpu")
"""Where rows that have ended wait for the learner."""
TokenMask = Bool[Tensor, "batch seq"]


class Recorder:
    """Records one part of a `Record` for the rows of a decoder; a subclass overrides what it listens to.

    `watching`, `stepped` and `sampled` run within a decode step, which may be captured as a CUDA graph: they
    must not wait for the device. All others run on the host between steps.
    """

    part: str
    """Name of the field of `Record`."""

    def begin(self, rows: Sequence[int]) -> None:
        """Forget these rows, which start another sequence."""

    def make_room(self, n_steps: int) -> None:
        """Prepare for so many steps; may wait for the device."""

    def begin_step(self) -> None:
        """Count a step or a feed, whose `sampled` follows by itself or as part of a CUDA graph."""

    def watching(self) -> AbstractContextManager[None]:
        """Within this block the model's next forward runs; `fed` or `stepped` follows."""
        return nullcontext()

    def fed(
        self,
        rows: Int[Tensor, " row"],
        columns: Int[Tensor, "batch new"],
        is_token: Bool[Tensor, "batch new"],
    ) -> None:
        """Record the forward of given tokens in these columns, each for `len(rows) / batch` rows."""

    def stepped(self, columns: Int[Tensor, " row"]) -> None:
        """Record the forward of one token for each row, in these columns; the last one is scratch space."""

    def sampled(self, rows: Int[Tensor, " row"], kept: Kept | None, is_running: Bool[Tensor, " row"]) -> None:
        """Record what the next tokens of these rows were chosen from; nothing for rows that do not run."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows alone, numbered anew in this order."""

    def read(self, rows: Sequence[int]) -> Any:
        """Return a copy on `HOST` of the record of finished rows: a tensor [row, ..., seq], or a list."""
        raise NotImplementedError

    def finish(self, found: Any, attention_mask: TokenMask, response_mask: TokenMask) -> Any:
        """Return the part of the record: what `read` gave of all rows, without unused columns, on `HOST`."""
        return found


class EvictionRecorder(Recorder):
    """The evictions, which the cache itself records."""

    part = "evicted_at"

    def __init__(self, kv: SlotCache) -> None:
        self._kv = kv

    def read(self, rows: Sequence[int]) -> Int[Tensor, "row layer kv_head seq"]:
        """Drop evictions after the query that predicted a row's last token, and narrow the others."""
        kv = self._kv
        index = torch.tensor(rows, device=kv.column.device)
        found, column = kv.evicted_at(index), torch.arange(kv.seq_len, device=index.device)
        first, last_query = kv.first[index, None], kv.column[index, None]
        found.masked_fill_(found > last_query[..., None, None], NEVER)
        is_token = (first <= column) & (column <= last_query + 1)
        return found.masked_fill_(~is_token[:, None, None], 0).to(times_dtype(kv.seq_len)).to(HOST)


class CodeRecorder(Recorder):
    """The codes of a quantized cache, which its layers record."""

    part = "codes"

    def __init__(self, kv: SlotCache, dtype: str) -> None:
        self._kv = kv
        self._dtype = dtype

    def begin(self, rows: Sequence[int]) -> None:
        self._kv.forget_codes(rows)

    def read(self, rows: Sequence[int]) -> Tensor:
        return self._kv.codes(rows).to(HOST)

    def finish(self, found: Tensor, attention_mask: TokenMask, response_mask: TokenMask) -> Codes:
        return Codes(self._dtype, self._kv.code_group, found, self._kv.balance)
