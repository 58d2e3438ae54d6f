"""Definition of an eviction: which keys are kept, and where they move."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F


def evict(
    scores: Float[Tensor, "batch kv_head slot"],
    keys: Shaped[Tensor, "batch kv_head slot dim"],
    values: Shaped[Tensor, "batch kv_head slot dim_v"],
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
    prompt_end: int = 0,
    scales: Sequence[Tensor] = (),
) -> None:
    """Compact each due row of a pool to the `budget` keys of highest score, and record the evictions.

    The `sink` first tokens (columns below first + sink) and the `window` last (columns from now - window on)
    are kept before all others. Columns below `prompt_end` are kept beside the budget. Equal scores keep the
    earlier key. NaN counts as the highest score, as in torch's sort. Kept keys move to the front in the order
    of their columns; the slots behind them keep their old content.

    Args:
        scores: read before anything moves, so it may be `attention` itself. Compared in float32.
        keys, values, columns: the pool, changed in place. The keys of a due row, at least `budget`, are in
            the order of their columns; the column of the slots behind them, which hold none, is -1. With
            `prompt_end` a row holds all its keys before it.
        attention: a running score that moves along with its key, in place; None if there is none.
        evicted_at: first query column that no longer sees the key of each column, written in place.
        is_due: rows to compact.
        now: first column whose query no longer sees the evicted keys: the newest column + 1.
        first: column of the first token; lower ones are padding or unused slots, never kept nor recorded.
        scales: those of keys and of values, [batch, kv_head, slot, scale], that move along where the pool
            holds codes; none for numbers.

    Raises:
        ValueError: `budget` is above the number of slots.
    """
    check_budget(budget, scores)
    rows = due_rows(is_due)
    due_columns, due_now, due_first = columns[rows].long(), now[rows], first[rows]
    limits = {"budget": budget, "sink": sink, "window": window, "prompt_end": prompt_end}
    kept, is_kept = choose_survivors(scores[rows], due_columns, due_now, due_first, **limits)

    evicted_at[rows] = record_evictions(evicted_at[rows], due_columns, is_kept, due_now, due_first)
    front = slice(kept.shape[2])
    for pool in (keys, values, *scales):
        pool[rows, :, front] = take_slots(pool[rows], kept)
    columns[rows, :, front] = columns[rows].gather(2, kept)
    if attention is not None:
        attention[rows, :, front] = attention[rows].gather(2, kept)


def record_evictions(
    evicted_at: Int[Tensor, "batch kv_head seq"],
    columns: Int[Tensor, "batch kv_head slot"],
    is_kept: Bool[Tensor, "batch kv_head slot"],
    now: Int[Tensor, " batch"],
    first: Int[Tensor, " batch"],
) -> Int[Tensor, "batch kv_head seq"]:
    """Return the table after an eviction: `now` for the key of each slot that is not kept."""
    is_evicted = ~is_kept & (columns >= first[:, None, None])
    n_columns = evicted_at.shape[2]
    recorded = F.pad(evicted_at, (0, 1))  # the last column takes what is not recorded
    now_of_slot = now[:, None, None].to(evicted_at.dtype).expand_as(columns)
    return recorded.scatter(2, columns.where(is_evicted, n_columns), now_of_slot)[..., :n_columns]


def check_budget(budget: int, scores: Tensor) -> None:
    """Raise a ValueError if the pool has fewer slots than `budget`."""
    if budget > scores.shape[-1]:
        raise ValueError(
            f"budget={budget} exceeds the pool's {scores.shape[-1]} slots, so there is nothing to evict; "
            "lower the budget or allocate more slots"
        )


def choose_survivors(
    scores: Float[Tensor, "batch kv_head slot"],
    columns: Int[Tensor, "batch kv_head slot"],
    now: Int[Tensor, " batch"],
    first: Int[Tensor, " batch"],
    *,
    budget: int,
    sink: int,
    window: int,
    prompt_end: int = 0,
) -> tuple[Int[Tensor, "batch kv_head kept"], Bool[Tensor, "batch kv_head slot"]]:
    """Return the slots to keep in ascending order, and True at these slots.

    Rows keep `budget` keys beside those before `prompt_end`. A row that keeps fewer than another ends with
    places that stay as they are.
    """
    is_protected = columns < (first + sink).clamp(min=prompt_end)[:, None, None]
    is_protected |= columns >= (now - window)[:, None, None]
    scores = scores.float().masked_fill(is_protected, torch.inf)
    scores = scores.masked_fill(columns < first[:, None, None], -torch.inf)
    # A stable sort breaks ties by position; the second sort restores the order of the columns.
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(order.shape[2], device=order.device)
    is_taken = (place < n_kept(budget, prompt_end, first)[:, None])[:, None].expand_as(order)
    is_kept = torch.zeros_like(is_taken).scatter(2, order, is_taken)
    in_front = slice(budget + prompt_end)
    kept = order.where(is_taken, order.shape[2])[..., in_front].sort(dim=-1).values
    return torch.where(kept < order.shape[2], kept, place[in_front]), is_kept


def n_kept(budget: int, prompt_end: int, first: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Return the keys that a compaction leaves in each row: `budget`, and those before `prompt_end`."""
    return budget + (prompt_end - first).clamp(min=0)


def due_rows(is_due: Bool[Tensor, " batch"]) -> Int[Tensor, " due"] | slice:
    """Return the indices of the due rows, or a slice if all are due, which saves a copy of the pool."""
    return slice(None) if bool(is_due.all()) else is_due.nonzero().flatten()


def take_slots(
    pool: Shaped[Tensor, "batch kv_head slot dim"], slots: Int[Tensor, "batch kv_head kept"]
) -> Shaped[Tensor, "batch kv_head kept dim"]:
    """Return the vectors of the chosen slots; faster than `gather`, which moves single numbers."""
    n_pools, n_slots = pool.shape[0] * pool.shape[1], pool.shape[2]
    start = torch.arange(n_pools, device=pool.device).view(*pool.shape[:2], 1) * n_slots
    vectors = pool.reshape(-1, pool.shape[-1])
    return vectors.index_select(0, (start + slots).flatten()).view(*slots.shape, pool.shape[-1])
