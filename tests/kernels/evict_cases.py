"""Pools to evict from, and the eviction of one by loops over keys."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lit_rlkv.kernels.evict import evict
from lit_rlkv.types import NEVER

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SINK, WINDOW = 2, 3


@dataclass(frozen=True)
class Pool:
    """Arguments of an eviction."""

    scores: Tensor
    keys: Tensor
    values: Tensor
    columns: Tensor
    attention: Tensor | None
    evicted_at: Tensor
    is_due: Tensor
    now: Tensor
    first: Tensor

    def on(self, device: str) -> "Pool":
        """A copy."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return Pool(**{n: None if t is None else t.clone().to(device) for n, t in tensors.items()})

    def same(self, other: "Pool") -> dict[str, bool]:
        """Return the names of the tensors that are bitwise equal."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return {n: bits_equal(a, b) for n, (a, b) in pairs.items() if a is not None}


def bits_equal(a: Tensor, b: Tensor) -> bool:
    words = {2: torch.int16, 4: torch.int32}.get(a.element_size())
    if a.is_floating_point() and words is not None:
        a, b = a.contiguous().view(words), b.contiguous().view(words)
    return torch.equal(a.cpu(), b.cpu())


def make_pool(
    n_slots: int,
    dtype: torch.dtype = torch.float32,
    column_dtype: torch.dtype = torch.int64,
    batch: int = 3,
    kv_heads: int = 2,
    dim: int = 16,
    dim_v: int = 8,
    has_attention: bool = True,
) -> Pool:
    """Full rows of different padding and age; the middle row is not due, and some scores tie."""
    generator = torch.Generator().manual_seed(n_slots)
    first = torch.tensor([5, 0, 11] * batch)[:batch]
    seq = 2 * n_slots + 20
    newest = first + 2 * n_slots - torch.arange(batch) % 2
    columns = torch.empty(batch, kv_heads, n_slots, dtype=torch.int64)
    for b in range(batch):
        for h in range(kv_heads):
            # The newest column is always there; which of the older ones are differs between heads.
            older = torch.randperm(int(newest[b] - first[b]), generator=generator)[: n_slots - 1]
            columns[b, h] = torch.cat([older.sort().values + first[b], newest[b : b + 1]])
    scores = torch.randint(0, max(n_slots // 3, 1), columns.shape, generator=generator) / 8 - 1.0
    return Pool(
        scores=scores,
        keys=torch.randn(*columns.shape, dim, generator=generator).to(dtype),
        values=torch.randn(*columns.shape, dim_v, generator=generator).to(dtype),
        columns=columns.to(column_dtype),
        attention=torch.rand(columns.shape, generator=generator) if has_attention else None,
        evicted_at=torch.where(torch.arange(seq) < first[:, None, None], 0, NEVER)
        .int()
        .repeat(1, kv_heads, 1),
        is_due=torch.arange(batch) != 1,
        now=newest + 1,
        first=first,
    )


def evict_pool(
    pool: Pool, budget: int, kernels: str, sink: int = SINK, window: int = WINDOW, prompt_end: int = 0
) -> None:
    tensors = [getattr(pool, f.name) for f in fields(pool)]
    evict(*tensors, budget=budget, sink=sink, window=window, prompt_end=prompt_end, kernels=kernels)


def evicted(
    pool: Pool, budget: int, kernels: str, sink: int = SINK, window: int = WINDOW, prompt_end: int = 0
) -> Pool:
    """The pool after an eviction; the one given stays as it was."""
    pool = pool.on(DEVICE)
    evict_pool(pool, budget, kernels, sink, window, prompt_end)
    return pool


def looped(pool: Pool, budget: int, sink: int = SINK, window: int = WINDOW, prompt_end: int = 0) -> Pool:
    """The same with loops over keys: what is kept is the first `budget` of a sorted list, and the prompt."""
    before, after = pool.on("cpu"), pool.on("cpu")
    for b in pool.is_due.nonzero().flatten().tolist():
        first, now = int(pool.first[b]), int(pool.now[b])
        for h in range(pool.columns.shape[1]):
            columns, scores = pool.columns[b, h].tolist(), pool.scores[b, h].tolist()
            places = []
            for slot, column in enumerate(columns):
                is_protected = column < max(first + sink, prompt_end) or column >= now - window
                places.append((not is_protected, -scores[slot] if not is_protected else 0.0, slot))
            n_kept = budget + max(prompt_end - first, 0)
            kept = sorted(slot for _, _, slot in sorted(places)[:n_kept])
            for place, slot in enumerate(kept):
                for name in ("keys", "values", "columns", "attention"):
                    if getattr(after, name) is not None:
                        getattr(after, name)[b, h, place] = getattr(before, name)[b, h, slot]
            for slot in set(range(len(columns))) - set(kept):
                after.evicted_at[b, h, columns[slot]] = now
    return after


def small_pool(scores: list[float]) -> Pool:
    """One head of one row; columns 4, 5, 6, ..., all of them real, slot number i holding the number i."""
    n, first = len(scores), 4
    numbers = torch.arange(n, dtype=torch.float32).view(1, 1, n, 1)
    return Pool(
        scores=torch.tensor(scores)[None, None],
        keys=numbers.repeat(1, 1, 1, 2),
        values=-numbers,
        columns=torch.arange(first, first + n)[None, None],
        attention=None,
        evicted_at=torch.full((1, 1, first + n + 3), NEVER, dtype=torch.int32),
        is_due=torch.tensor([True]),
        now=torch.tensor([first + n]),
        first=torch.tensor([first]),
    )
