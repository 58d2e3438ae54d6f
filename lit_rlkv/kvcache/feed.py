"""Feed: given tokens of one forward, and how their keys stand beside those that their rows already hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from lit_rlkv.kernels.evict import take_slots


@dataclass(frozen=True)
class Feed:
    """Left-padded tokens of one forward, and the rows of the pool that take them.

    The keys that a layer attends to are its candidates for the pool: those that a row holds, then the new
    ones, in the order of their columns. They are aligned to the right, as left-padded prompts are.
    """

    rows: Int[Tensor, " row"]
    """Rows of the pool; those of the same tokens are neighbours, and the first of them holds their keys."""
    span: slice | None
    """`rows` as a slice if they are consecutive, because copying to a slice is much faster."""
    is_token: Bool[Tensor, "batch new"]
    n_new: Int[Tensor, " batch"]
    n_held: Int[Tensor, " batch"]
    """Keys that each row holds before; 0 at the begin of a sequence."""
    n_kept: Int[Tensor, " batch"]
    """Keys that each row holds afterwards."""
    most_held: int
    is_padded: bool
    """True if the rows hold different numbers of keys, or take different numbers of tokens."""
    first: Int[Tensor, " batch"]
    """Column of the first token of each sequence."""
    newest: Int[Tensor, " batch"]
    """Column of the last token that is given."""
    is_due: Bool[Tensor, " batch"]
    """Rows with more candidates than the budget."""
    due: Int[Tensor, " due"] | None
    """Indices of those rows; None if there are none."""

    @property
    def n_samples(self) -> int:
        """Rows that take the same tokens."""
        return len(self.rows) // len(self.is_token)

    @property
    def sources(self) -> Int[Tensor, " batch"]:
        """The rows that hold the keys before."""
        return self.rows[:: self.n_samples]

    def rows_of(self, sample: int) -> Int[Tensor, " batch"] | slice:
        """Return row number `sample` of all that take the same tokens."""
        if self.span is None:
            return self.rows[sample :: self.n_samples]
        return slice(self.span.start + sample, self.span.stop, self.n_samples)

    @property
    def all_rows(self) -> Int[Tensor, " row"] | slice:
        """All rows, as a slice if they are consecutive."""
        return self.rows if self.span is None else self.span

    @property
    def width(self) -> int:
        """Columns of the given tokens, padding included."""
        return self.is_token.shape[1]

    @cached_property
    def columns(self) -> Int[Tensor, "batch new"]:
        """Column of each given token in its sequence."""
        place = torch.arange(self.width, device=self.newest.device)
        return self.newest[:, None] + place - (self.width - 1)

    @property
    def n_padding(self) -> Int[Tensor, " batch"]:
        """Places before the first candidate of each row."""
        return self.most_held + self.width - self.n_held - self.n_new

    @cached_property
    def is_candidate(self) -> Bool[Tensor, "batch candidate"]:
        return torch.arange(self.most_held + self.width, device=self.n_new.device) >= self.n_padding[:, None]

    def is_seen(self, tokens: Int[Tensor, " query"]) -> Bool[Tensor, "batch query candidate"]:
        """Return True where one of these given tokens sees a candidate: no later new ones than its own."""
        place = torch.arange(self.most_held + self.width, device=tokens.device)
        return self.is_candidate[:, None] & (place <= self.most_held + tokens[:, None])

    @cached_property
    def _order(self) -> Int[Tensor, "batch candidate"]:
        """Place of each candidate in the held keys followed by the new ones, before alignment."""
        place = torch.arange(self.most_held + self.width, device=self.n_new.device)
        is_new = place >= len(place) - self.n_new[:, None]
        return torch.where(is_new, place, (place - self.n_padding[:, None]).clamp(min=0))

    def join(
        self, held: Shaped[Tensor, "batch kv_head held *dim"], new: Shaped[Tensor, "batch kv_head new *dim"]
    ) -> Shaped[Tensor, "batch kv_head candidate *dim"]:
        """Return the candidates; those of padding are arbitrary."""
        joined = torch.cat([held, new], dim=2)
        if not self.is_padded:
            return joined
        order = self._order[:, None].expand(-1, joined.shape[1], -1)
        return take_slots(joined, order) if joined.ndim == 4 else joined.gather(2, order)

    def ring_places(
        self, newest: Int[Tensor, " batch"], n_places: int
    ) -> tuple[Int[Tensor, "batch place"], Bool[Tensor, "batch place"]]:
        """Return the new token that a ring has at each place after the feed, and True where there is one.

        Args:
            newest: number of the last token of each row; token n stands at place n % `n_places`.
        """
        age = (newest[:, None] - torch.arange(n_places, device=newest.device)) % n_places
        return (self.width - 1 - age).clamp(min=0), age < self.n_new[:, None]


def span_of(rows: Sequence[int]) -> slice | None:
    """Return consecutive rows as a slice; None for others."""
    span = slice(rows[0], rows[0] + len(rows))
    return span if list(rows) == list(range(span.start, span.stop)) else None
