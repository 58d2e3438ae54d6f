"""Sets of tokens that distributions are renormalised over, one for each position, of any sizes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NARROW = 1 / 4
"""If the largest set of a chunk is at most this part of the vocabulary, the logits of its sets are gathered;
otherwise all others are masked."""


@dataclass(frozen=True)
class TokenSets:
    """The tokens of nonzero probability at each position."""

    counts: Int[Tensor, " position"]
    token_ids: Int[Tensor, " kept"]
    """The ids of the first position, then those of the second, and so on."""

    @property
    def spans(self) -> tuple[Int[Tensor, " position"], Int[Tensor, " position"]]:
        """The place in `token_ids` where each position's ids start, and their number."""
        counts = self.counts.long()
        return counts.cumsum(dim=0) - counts, counts

    def of_chunk(
        self, starts: Int[Tensor, " position"], counts: Int[Tensor, " position"], vocab_size: int
    ) -> "ChunkSets":
        """Return the sets of consecutive positions, given their spans. Waits for the device once."""
        if len(counts) == 0:
            return ChunkSets(None, torch.ones(0, vocab_size, dtype=torch.bool, device=counts.device))
        first, n_kept, largest = torch.stack([starts[0], counts.sum(), counts.max()]).tolist()
        if largest > vocab_size * NARROW:
            ids = self.token_ids[first : first + n_kept].long()
            row = torch.arange(len(counts), device=counts.device)
            row = row.repeat_interleave(counts, output_size=n_kept)
            is_kept = torch.zeros(len(counts), vocab_size, dtype=torch.bool, device=counts.device)
            is_kept[row, ids] = True
            return ChunkSets(None, is_kept)
        place = torch.arange(largest + 1, device=counts.device)  # the last place is always empty
        is_kept = place < counts[:, None]
        ids = self.token_ids[(starts[:, None] + place).masked_fill(~is_kept, first)].long()
        return ChunkSets(ids, is_kept)


@dataclass(frozen=True)
class ChunkSets:
    """The sets of a chunk: ids of each position, or all tokens of the vocabulary with a mask."""

    ids: Int[Tensor, "position place"] | None
    """None: places are token ids."""
    is_kept: Bool[Tensor, "position place"] | None
    """None: all are."""

    def logits(self, logits: Float[Tensor, "position vocab"]) -> Float[Tensor, "position place"]:
        """Return the logits of the sets; -inf elsewhere, where they have no gradient."""
        if self.ids is not None:
            logits = logits.gather(-1, self.ids)
        return logits if self.is_kept is None else logits.masked_fill(~self.is_kept, -torch.inf)

    def places(self, tokens: Int[Tensor, " position"]) -> Int[Tensor, " position"]:
        """Return the place of each token; that of a logit of -inf if it is not in its set."""
        if self.ids is None or self.is_kept is None:
            return tokens
        is_token = (self.ids == tokens[:, None]) & self.is_kept
        return torch.where(is_token.any(-1), is_token.int().argmax(-1), self.ids.shape[-1] - 1)


def spans_of(sets: TokenSets | None) -> tuple[Tensor, ...]:
    """Return the spans of the sets, to be cut into chunks with other tensors; none without sets."""
    return () if sets is None else sets.spans


def kept_logits(
    sets: TokenSets | None,
    spans: Sequence[Tensor],
    logits: Float[Tensor, "position vocab"],
    tokens: Int[Tensor, " position"],
) -> tuple[Float[Tensor, "position place"], Int[Tensor, " position"]]:
    """Return the logits of a chunk's sets, and the place of each token among them; see `chunk_of`."""
    if sets is None:
        return logits, tokens
    kept = chunk_of(sets, spans, logits)
    return kept.logits(logits), kept.places(tokens)


def kept_pair(
    sets: TokenSets | None, spans: Sequence[Tensor], p_logits: Tensor, q_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logits of two policies for the same sets of a chunk; see `chunk_of`."""
    if sets is None:
        return p_logits, q_logits
    kept = chunk_of(sets, spans, p_logits)
    return kept.logits(p_logits), kept.logits(q_logits)


def chunk_of(
    sets: TokenSets | None, spans: Sequence[Tensor], logits: Float[Tensor, "position vocab"]
) -> ChunkSets:
    """Return the sets of the positions of `logits`; without sets those of the whole vocabulary.

    Args:
        spans: the chunk of each tensor of `spans_of(sets)`.
    """
    if sets is None:
        return ChunkSets(None, None)
    starts, counts = spans
    return sets.of_chunk(starts, counts, logits.shape[-1])
