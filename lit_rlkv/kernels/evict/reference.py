"""Which keys survive a compaction, and where they move: the definition."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def evict(
    scores: Float[Tensor, "batch kv_head slot"],
    keys: Float[Tensor, "batch kv_head slot dim"],
    values: Float[Tensor, "batch kv_head slot dim_v"],
    columns: Int[Tensor, "batch kv_head slot"],
    attention: Float[Tensor, "batch kv_head slot"] | None,
    evicted_at: Int[Tensor, "batch kv_head seq"],
    is_due: Bool[Tensor, " batch"],
    now: Int[Tensor, " batch"],
    first: Int[Tensor, " batch"],
    *,
    budget: int,
    sink: int,
    window: int,
) -> None:
    """Compact the due rows in place to the chosen survivors; record the evictions of the others."""
    rows = due_rows(is_due)
    due_columns, due_now, due_first = columns[rows].long(), now[rows], first[rows]
    limits = {"budget": budget, "sink": sink, "window": window}
    kept = choose_survivors(scores[rows], due_columns, due_now, due_first, **limits)

    is_kept = torch.zeros_like(due_columns, dtype=torch.bool).scatter(2, kept, True)
    is_evicted = ~is_kept & (due_columns >= due_first[:, None, None])
    died_at = due_now[:, None, None].to(evicted_at.dtype)
    evictions = evicted_at[rows]
    died_at = torch.where(is_evicted, died_at, evictions.gather(2, due_columns))
    evicted_at[rows] = evictions.scatter(2, due_columns, died_at)

    keys[rows, :, :budget] = take_slots(keys[rows], kept)
    values[rows, :, :budget] = take_slots(values[rows], kept)
    columns[rows, :, :budget] = columns[rows].gather(2, kept)
    if attention is not None:
        attention[rows, :, :budget] = attention[rows].gather(2, kept)


def choose_survivors(
    scores: Float[Tensor, "batch kv_head slot"],
    columns: Int[Tensor, "batch kv_head slot"],
    now: Int[Tensor, " batch"],
    first: Int[Tensor, " batch"],
    *,
    budget: int,
    sink: int,
    window: int,
) -> Int[Tensor, "batch kv_head budget"]:
    """The slots to keep, in the order of their columns, which is that of the slots."""
    is_protected = columns < (first + sink)[:, None, None]
    is_protected |= columns >= (now - window)[:, None, None]
    scores = scores.float().masked_fill(is_protected, torch.inf)
    scores = scores.masked_fill(columns < first[:, None, None], -torch.inf)
    # A stable sort breaks ties by position; the second sort restores the order of the columns.
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :budget].sort(dim=-1).values


def due_rows(is_due: Bool[Tensor, " batch"]) -> Int[Tensor, " due"] | slice:
    """Rows to pick; of a whole batch a slice, because picking its rows would copy the pool for nothing."""
    return slice(None) if bool(is_due.all()) else is_due.nonzero().flatten()


def take_slots(
    pool: Float[Tensor, "batch kv_head slot dim"], slots: Int[Tensor, "batch kv_head kept"]
) -> Float[Tensor, "batch kv_head kept dim"]:
    """The chosen slots of each row and head, moved as whole vectors; gather would move single numbers."""
    n_pools, n_slots = pool.shape[0] * pool.shape[1], pool.shape[2]
    start = torch.arange(n_pools, device=pool.device).view(*pool.shape[:2], 1) * n_slots
    vectors = pool.reshape(-1, pool.shape[-1])
    return vectors.index_select(0, (start + slots).flatten()).view(*slots.shape, pool.shape[-1])
