"""MaskRecorder: the token ids that the sampler kept at each step, without a wait for the device within it."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int, Int32, UInt8
from torch import Tensor

from lit_rlkv.rollout.recorders import HOST, Recorder, TokenMask
from lit_rlkv.rollout.sampling import Kept
from lit_rlkv.types import SamplingMasks

N_SLOTS = 32
"""Steps that the ring holds."""
MAX_UNPACKED = 2**27
"""Most bits that are unpacked at once, into a byte each."""

RowIds = tuple[Int32[Tensor, " _"], Int32[Tensor, " _"]]
"""The ids that were kept for one row: their number for each response token, and all of them."""


class MaskRecorder(Recorder):
    """Records what the sampler chose from, for the rows of a decoder.

    A step writes fixed shapes into a ring on the device, so that it can be captured as a CUDA graph: the ids
    of `top_k`, or the mask over the vocabulary with a bit per token. When the ring is full, or a row is read,
    its content is moved into lists of ragged ids, one list per row.
    """

    part = "sampling_masks"

    def __init__(self, n_rows: int, device: torch.device) -> None:
        self._found: list[list[RowIds]] = [[] for _ in range(n_rows)]
        self._ring: Tensor | None = None
        self._slot = torch.zeros(1, dtype=torch.long, device=device)
        """Place of the next step in the ring, for steps whose Python does not run."""
        self._n_used = 0

    def begin(self, rows: Sequence[int]) -> None:
        self.flush()
        for row in rows:
            self._found[row] = []

    def make_room(self, n_steps: int) -> None:
        if self._n_used + n_steps > N_SLOTS:
            self.flush()

    def begin_step(self) -> None:
        self.make_room(1)
        self._n_used += 1

    def sampled(self, rows: Int[Tensor, " row"], kept: Kept | None, is_running: Bool[Tensor, " row"]) -> None:
        assert kept is not None
        if kept.dtype == torch.bool:
            entry = pack_bits(kept).masked_fill(~is_running[:, None], 0)
        else:
            entry = kept.masked_fill(~is_running[:, None], -1)
        if self._ring is None:  # in the first prefill, which runs eagerly
            shape = (N_SLOTS, len(self._found), entry.shape[1])
            self._ring = entry.new_full(shape, _empty(entry))
        self._ring[self._slot.expand(len(rows)), rows] = entry
        self._slot += 1

    def flush(self) -> None:
        """Move the content of the ring into the lists; waits for the device."""
        if self._n_used == 0:
            return
        assert self._ring is not None
        ring = self._ring[: self._n_used].transpose(0, 1)
        n_at_once = max(MAX_UNPACKED // (8 * ring[0].numel()), 1)
        for first in range(0, len(ring), n_at_once):
            is_kept, ids = _unpack(ring[first : first + n_at_once])
            counts = is_kept.sum(dim=-1, dtype=torch.int32)
            by_row = zip(counts, torch.split(ids, counts.sum(dim=1).tolist()), strict=True)
            for row, (row_counts, row_ids) in enumerate(by_row, start=first):
                if len(row_ids) > 0:
                    self._found[row].append((row_counts, row_ids))
        self._ring[: self._n_used] = _empty(ring)
        self._slot.zero_()
        self._n_used = 0

    def read(self, rows: Sequence[int]) -> list[RowIds]:
        self.flush()
        found = []
        for row in rows:
            counts, ids = (torch.cat(parts) for parts in zip(*self._found[row], strict=True))
            found.append((counts[counts > 0].to(HOST), ids.to(HOST)))
        return found

    def keep(self, rows: Sequence[int]) -> None:
        self.flush()
        self._found = [self._found[row] for row in rows]
        if self._ring is not None:
            self._ring = self._ring.new_full((N_SLOTS, len(rows), self._ring.shape[2]), _empty(self._ring))

    def finish(
        self, found: list[RowIds], attention_mask: TokenMask, response_mask: TokenMask
    ) -> SamplingMasks:
        counts, ids = (torch.cat(parts) for parts in zip(*found, strict=True))
        empty = torch.zeros_like(response_mask, dtype=torch.int32)
        return SamplingMasks(empty.masked_scatter(response_mask, counts), ids)


def pack_bits(is_kept: Bool[Tensor, "row vocab"]) -> UInt8[Tensor, "row byte"]:
    """Return eight tokens per byte, the last byte filled up with zeros.

    The product moves the bytes of eight bools, which are 0 or 1, next to each other into the highest byte.
    """
    n_missing = -is_kept.shape[1] % 8
    if n_missing > 0:
        is_kept = torch.nn.functional.pad(is_kept, (0, n_missing))
    eight = is_kept.contiguous().view(torch.int64)
    return (eight * 0x0102040810204080 >> 56).to(torch.uint8)


def unpack_bits(bits: UInt8[Tensor, "*lead byte"]) -> Bool[Tensor, "*lead vocab"]:
    """Return a bool per token, with up to seven more tokens than were packed."""
    place = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=bits.device)
    return (bits[..., None] & place != 0).flatten(-2)


def _empty(ring: Tensor) -> int:
    return 0 if ring.dtype == torch.uint8 else -1


def _unpack(part: Tensor) -> tuple[Bool[Tensor, "row slot place"], Int32[Tensor, " kept"]]:
    """Return what a part of the ring holds: a mask, and the ids row by row and slot by slot."""
    if part.dtype == torch.uint8:
        is_kept = unpack_bits(part)
        return is_kept, (is_kept.flatten().nonzero()[:, 0] % is_kept.shape[-1]).int()
    is_kept = part >= 0
    return is_kept, part[is_kept]
