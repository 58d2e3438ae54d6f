"""RecentQueries: the latest queries of each row of a layer, for policies that score keys by them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_rlkv.kvcache.feed import Feed


class RecentQueries:
    """A ring buffer of the last `window` queries of each row; the query of column c is at index c % window.

    Args:
        like: queries, from which dtype, device and the sizes of heads are taken.
    """

    def __init__(self, like: Float[Tensor, "batch kv_head group seq dim"], n_rows: int, window: int) -> None:
        _, n_kv_heads, group, _, dim = like.shape
        self.ring = like.new_zeros(n_rows, window, n_kv_heads, group, dim)
        self._window = window

    @property
    def dtype(self) -> torch.dtype:
        return self.ring.dtype

    def write_feed(self, feed: Feed, queries: Float[Tensor, "batch kv_head group new dim"]) -> None:
        """Write the last queries of given tokens, for all rows that take them."""
        index, is_new = feed.ring_places(feed.newest, self._window)
        batch = torch.arange(len(index), device=index.device)[:, None]
        latest = queries.movedim(3, 1)[batch, index]
        ring = torch.where(is_new[..., None, None, None], latest, self.ring[feed.sources])
        self.ring[feed.rows] = ring.repeat_interleave(feed.n_samples, dim=0)

    def write(self, columns: Int[Tensor, " row"], queries: Float[Tensor, "row kv_head group dim"]) -> None:
        """Write one query of every row, at the row's column."""
        first = torch.arange(len(columns), device=columns.device) * self._window
        self.ring.flatten(0, 1).index_copy_(0, first + columns % self._window, queries)

    def read(
        self, rows: Int[Tensor, " batch"] | slice, newest: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch kv_head group window dim"], Int[Tensor, "batch window"]]:
        """Return the queries of these rows, whose latest is at column `newest`, and their columns."""
        place = torch.arange(self._window, device=newest.device)
        columns = newest[:, None] - (newest[:, None] - place) % self._window
        return self.ring[rows].permute(0, 2, 3, 1, 4), columns
