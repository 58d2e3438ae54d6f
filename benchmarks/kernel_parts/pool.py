"""A pool of slots at the moment it is full: what scores and compaction are measured on."""

from dataclasses import dataclass
from functools import partial

import torch
from kernel_parts.case import Arm, Setting
from kernel_parts.counts import decode_work
from torch import Tensor

from lit_rlkv.kernels.decode_attention import decode_attention


@dataclass(frozen=True)
class PoolSizes:
    """Bytes of one layer."""

    batch: int
    n_kv_heads: int
    group: int
    dim: int
    budget: int
    interval: int
    window: int
    sink: int = 4

    @property
    def n_slots(self) -> int:
        return self.budget + self.interval

    @property
    def n_seen(self) -> int:
        """Columns of the sequences so far."""
        return 4 * self.n_slots


REAL, TOY = PoolSizes(64, 8, 4, 128, 1024, 128, 16), PoolSizes(2, 2, 2, 16, 32, 8, 4)


@dataclass(frozen=True)
class Pool:
    """A full pool, and what policies look at."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    columns: Tensor
    query_columns: Tensor
    is_live: Tensor
    is_recent: Tensor
    is_due: Tensor
    sizes: PoolSizes
    n_due: int

    @property
    def scaling(self) -> float:
        return self.sizes.dim**-0.5

    @property
    def n_pools(self) -> int:
        """Rows that are due, times KV heads."""
        return self.n_due * self.sizes.n_kv_heads

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(value for value in vars(self).values() if isinstance(value, Tensor))

    @property
    def described(self) -> dict[str, int | str]:
        return {**vars(self.sizes), "slots": self.sizes.n_slots, "due": self.n_due}


def due_counts(sizes: PoolSizes) -> tuple[int, int]:
    """Prompts of one length come due together, those of different lengths one by one."""
    return sizes.batch, 1


def make_pool(setting: Setting, n_due: int) -> Pool:
    """Survivors of earlier compactions and the tokens since; a third of the keys are near-duplicates."""
    sizes = TOY if setting.is_toy else REAL
    shape, device = (sizes.batch, sizes.n_kv_heads), setting.device
    keys, values = (setting.random(*shape, sizes.n_slots, sizes.dim, seed=seed) for seed in (1, 2))
    keys[:, :, 1::3] = keys[:, :, :1] + 0.5 * keys[:, :, 1::3]  # cosines of about 0.8 to each other
    n_old = sizes.n_seen - sizes.interval
    draw = torch.rand(*shape, n_old, generator=torch.Generator().manual_seed(0))
    survivors = draw.argsort(-1)[..., : sizes.budget].sort(-1).values
    newest = torch.arange(n_old, sizes.n_seen).expand(*shape, -1)
    columns = torch.cat([survivors, newest], dim=-1).to(device)
    window = torch.arange(sizes.n_seen - sizes.window, sizes.n_seen, device=device)
    return Pool(
        queries=setting.random(*shape, sizes.group, sizes.window, sizes.dim, seed=3),
        keys=keys,
        values=values,
        columns=columns,
        query_columns=window.expand(sizes.batch, -1),
        is_live=torch.ones_like(columns, dtype=torch.bool),
        is_recent=columns >= window[0],
        is_due=torch.arange(sizes.batch, device=device) < n_due,
        sizes=sizes,
        n_due=n_due,
    )


def decode_arm(setting: Setting, pool: Pool) -> Arm:
    """One layer's attention of one step over the same pool, of which there are `interval` to a compaction."""
    sizes = pool.sizes
    query = setting.random(sizes.batch, sizes.n_kv_heads, sizes.group, sizes.dim, seed=5)
    n_live = torch.full((sizes.batch,), sizes.n_slots, device=setting.device)
    call = partial(
        decode_attention, query, pool.keys, pool.values, n_live, pool.scaling, kernels=setting.timed_kernels
    )
    pairs, itemsize = sizes.batch * sizes.n_kv_heads, pool.keys.element_size()
    work = decode_work(pairs, sizes.group, sizes.n_slots, sizes.dim, itemsize, n_score_passes=0)
    return Arm("decode attention", call, work)
