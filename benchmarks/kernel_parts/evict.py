"""Cases of the compaction, beside the decode steps that pay for it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from kernel_parts.accuracy import require_equal
from kernel_parts.case import Arm, Builders, Case, Setting
from kernel_parts.counts import Work, evict_work
from kernel_parts.evictions import NEVER
from kernel_parts.pool import REAL, TOY, Pool, decode_arm, due_counts, make_pool
from torch import Tensor

from lit_rlkv.kernels.evict import choose_survivors, evict


@dataclass(frozen=True)
class Compaction:
    """A pool, its scores, and what a compaction changes in place."""

    pool: Pool
    scores: Tensor
    keys: Tensor
    values: Tensor
    columns: Tensor
    attention: Tensor | None
    """A running score that moves along."""
    evicted_at: Tensor
    now: Tensor
    first: Tensor

    @property
    def limits(self) -> dict[str, int]:
        sizes = self.pool.sizes
        return {"budget": sizes.budget, "sink": sizes.sink, "window": sizes.window}

    def run(self, kernels: str, compact: Callable[..., None] = evict) -> None:
        moved = (self.keys, self.values, self.columns, self.attention, self.evicted_at)
        scores = self.scores if self.attention is None else self.attention
        compact(scores, *moved, self.pool.is_due, self.now, self.first, **self.limits, kernels=kernels)

    def restore(self) -> None:
        """Scores that decide which keys survive."""
        self.columns.copy_(self.pool.columns)
        if self.attention is not None:
            self.attention.copy_(self.scores)

    def results(self) -> dict[str, Tensor]:
        """Return the surviving slots, which define a compaction."""
        names = ("keys", "values", "columns", "attention")
        kept = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        budget = self.limits["budget"]
        return {name: tensor[:, :, :budget] for name, tensor in kept.items()} | {
            "evicted_at": self.evicted_at
        }


def cases(setting: Setting) -> Builders:
    """With and without a running score that moves along, when all rows are due at once and when one is."""
    sizes = TOY if setting.is_toy else REAL
    for n_due in due_counts(sizes):
        for policy in ("h2o, tova", "others"):
            label = f"policy {policy}, {n_due} of {sizes.batch} rows due"
            yield label, partial(_case, setting, label, policy == "h2o, tova", n_due)


def make_compaction(setting: Setting, moves_attention: bool, n_due: int) -> Compaction:
    pool = make_pool(setting, n_due)
    sizes, device = pool.sizes, setting.device
    scores = setting.random(*pool.columns.shape, seed=4).float().abs()
    evicted_at = torch.full((*pool.columns.shape[:2], sizes.n_seen), NEVER, dtype=torch.int32, device=device)
    return Compaction(
        pool,
        scores,
        pool.keys.clone(),
        pool.values.clone(),
        pool.columns.clone(),
        scores.clone() if moves_attention else None,
        evicted_at,
        now=torch.full((sizes.batch,), sizes.n_seen, device=device),
        first=torch.zeros(sizes.batch, dtype=torch.long, device=device),
    )


def _case(setting: Setting, label: str, moves_attention: bool, n_due: int) -> Case:
    ours = make_compaction(setting, moves_attention, n_due)
    work = counted(ours)
    ways = dict.fromkeys((setting.timed_kernels, "reference"))
    return Case(
        op="evict",
        label=label,
        sizes=ours.pool.described | {"moves_attention": int(moves_attention)},
        arms=(
            *(Arm(kernels, partial(ours.run, kernels), work) for kernels in ways),
            decode_arm(setting, ours.pool),
        ),
        check=partial(check, setting, label, moves_attention, n_due),
        inputs=(*ours.pool.tensors, *ours.results().values(), ours.scores),
        prepare=ours.restore,
    )


def counted(compaction: Compaction) -> Work:
    """From what this very compaction moves."""
    c, due = compaction, compaction.pool.is_due
    kept, _ = choose_survivors(c.scores[due], c.columns[due], c.now[due], c.first[due], **c.limits)
    n_moved = int((kept != torch.arange(kept.shape[-1], device=kept.device)).sum())
    sizes, n_pools = c.pool.sizes, c.pool.n_pools
    n_dead = n_pools * sizes.interval
    return evict_work(n_pools, sizes.n_slots, n_moved, n_dead, sizes.dim, c.keys.element_size())


def check(
    setting: Setting, label: str, moves_attention: bool, n_due: int, compact: Callable[..., None] = evict
) -> float:
    """Every survivor and every evicted_at as the definition has them, to the bit."""
    actual, expected = (make_compaction(setting, moves_attention, n_due) for _ in range(2))
    actual.run("triton", compact)
    expected.run("reference")
    truths = expected.results()
    return require_equal(
        f"evict, {label}", {name: (value, truths[name]) for name, value in actual.results().items()}
    )
