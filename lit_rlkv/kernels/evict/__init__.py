"""Eviction: from scores to survivors, compacted in place, with every evicted_at on record."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_rlkv.kernels.backend import uses_triton
from lit_rlkv.kernels.evict import reference
from lit_rlkv.kernels.evict.reference import choose_survivors, due_rows, take_slots

__all__ = ["choose_survivors", "due_rows", "evict", "take_slots"]


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
    kernels: str | None = None,
) -> None:
    """Compact each due row of a pool to the `budget` keys of highest score; the others die at column `now`.

    Kept before all others are the `sink` first tokens, columns below first + sink, and the `window` last,
    from column now - window on. Equal scores keep the earlier key; a score that is not a number counts as the
    highest of all, as in torch's sort. Survivors move to the front in the order of their columns; what stands
    behind them is what stood there before.

    Args:
        scores: read in rows that are due, before anything moves: it may be `attention` itself. Compared in
            float32.
        keys, values, columns: the pool, changed in place. In a row that is due all slots are taken, and they
            stand in the order of their columns.
        attention: a running score that moves along with its key, in place; None if there is none.
        evicted_at: first query column that no longer sees the key of each column, written in place.
        now: first column whose query no longer sees what is evicted, the newest column + 1.
        first: column of the first real token; columns before it are padding, never kept, and have no evicted_at.

    Raises:
        ValueError: `budget` is above the number of slots.
    """
    if budget > scores.shape[-1]:
        raise ValueError(
            f"budget={budget} exceeds the pool's {scores.shape[-1]} slots, so there is nothing to evict; "
            "lower the budget or allocate more slots"
        )
    chosen = reference.evict
    if uses_triton(keys, kernels):
        from lit_rlkv.kernels.evict import kernel  # not at the top: Triton exists on Linux only

        chosen = kernel.evict
    pool = (scores, keys, values, columns, attention, evicted_at)
    chosen(*pool, is_due, now, first, budget=budget, sink=sink, window=window)
