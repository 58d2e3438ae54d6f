"""Launch the Triton kernels of shadow attention."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from lit_rlkv.kernels.device import device_info
from lit_rlkv.kernels.shadow_attention import kernel
from lit_rlkv.kernels.shadow_attention.splits import choose_n_splits, programs_per_multiprocessor
from lit_rlkv.kernels.shadow_attention.tiles import Tiles, TilesOfPasses, tiles_for

LOG2E = 1.4426950408889634
ENTRIES_AT_A_TIME = 1024
DELTA_TILE = 8192
"""Numbers of the output, and of its gradient, per program that computes delta."""
FLOPS_PER_BYTE = {torch.float32: 15, torch.float16: 120, torch.bfloat16: 120}
"""Flops of a matrix product in the time of a byte from memory, which weigh the sum of splits against waves.

Assumed of every device: 400 TFLOP/s with tensor cores, 50 without, and 3.35 TB/s.
"""


@dataclass(frozen=True)
class Inputs:
    """Inputs of forward and backward pass; the last dimension of the tensors is contiguous."""

    query: Float[Tensor, "batch head seq dim"]
    key: Float[Tensor, "batch kv_head seq dim"]
    value: Float[Tensor, "batch kv_head seq dim_v"]
    evicted_at: Int[Tensor, "batch #kv_head seq"]  # noqa: F821 (ruff reads the shape as code)
    scaling: float
    softcap: float | None
    block: int
    n_slots: int
    """Length of each block's list; 0 for contiguous mode, without lists."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def n_blocks(self) -> int:
        """Blocks of queries in a sequence, the last perhaps not full."""
        return triton.cdiv(self.query.shape[2], self.block)

    @property
    def tiles(self) -> TilesOfPasses:
        """Tile sizes of all passes, for the wider of the two head dimensions."""
        return tiles_for(self.query, max(_width(self.query.shape[-1]), _width(self.value.shape[-1])))

    def arguments(self, tiles: Tiles) -> dict[str, Any]:
        """Return the arguments of all passes, by name: tensors, numbers and compile-time constants."""
        logits = {"inner": 0.0, "outer": self.scaling * LOG2E}
        if self.softcap is not None:
            logits = {"inner": self.scaling / self.softcap, "outer": self.softcap * LOG2E}
        dim, dim_v = self.query.shape[-1], self.value.shape[-1]
        return {
            **_with_strides(query=self.query, key=self.key, value=self.value),
            **logits,
            "evicted_at": self.evicted_at,
            "n_heads": self.query.shape[1],
            "n_tables": self.evicted_at.shape[1],
            "seq": self.query.shape[2],
            "n_slots": self.n_slots,
            "GROUP": self.group,
            "DIM": dim,
            "DIM_V": dim_v,
            "WIDTH": _width(dim),
            "WIDTH_V": _width(dim_v),
            "BLOCK": self.block,
            "QUERIES": min(tiles.queries, self.block) if self.n_slots else tiles.queries,
            "KEYS": tiles.keys,
            "LISTED": self.n_slots > 0,
            "CAPPED": self.softcap is not None,
            "PRECISION": "ieee" if self.query.dtype == torch.float32 else "tf32",
            "num_warps": tiles.n_warps,
            "num_stages": tiles.n_stages,
        }


def forward(inputs: Inputs) -> tuple[Float[Tensor, "batch head seq dim_v"], Float[Tensor, "batch head seq"]]:
    """Return the output, in memory [batch seq head dim_v], and the float32 log-sum-exp."""
    batch, n_heads, seq, _ = inputs.query.shape
    arguments = inputs.arguments(_with_prefetch(inputs, inputs.tiles.forward))
    out = by_position(inputs.value, n_heads)
    lse = torch.empty(batch, n_heads, seq, dtype=torch.float32, device=out.device)
    grid = (batch * n_heads, triton.cdiv(seq, arguments["QUERIES"]))
    kernel._forward[grid](**_table(inputs), out=out, lse=lse, **arguments)
    return out, lse


def backward(
    inputs: Inputs,
    d_out: Float[Tensor, "batch head seq dim_v"],
    d_lse: Float[Tensor, "batch head seq"],
    out: Float[Tensor, "batch head seq dim_v"],
    lse: Float[Tensor, "batch head seq"],
    slot_of: Tensor | None,
) -> tuple[
    Float[Tensor, "batch head seq dim"],
    Float[Tensor, "batch kv_head seq dim"],
    Float[Tensor, "batch kv_head seq dim_v"],
]:
    """Return the gradients of query, key and value, each in memory [batch seq head dim]."""
    batch, n_heads, seq, _ = inputs.query.shape
    common = {
        **_with_strides(d_out=d_out),
        "lse": lse,
        "delta": _deltas(out, d_out, d_lse),
        "scaling": inputs.scaling,
    }
    arguments = common | inputs.arguments(_with_prefetch(inputs, inputs.tiles.query_gradients))
    d_query = by_position(inputs.query, n_heads)
    grid = (batch * n_heads, triton.cdiv(seq, arguments["QUERIES"]))
    kernel._query_gradients[grid](**_table(inputs), d_query=d_query, **arguments)
    return d_query, *_key_gradients(inputs, common, slot_of)


def _key_gradients(
    inputs: Inputs, common: dict[str, Any], slot_of: Tensor | None
) -> tuple[Float[Tensor, "batch kv_head seq dim"], Float[Tensor, "batch kv_head seq dim_v"]]:
    batch, n_kv_heads, seq, _ = inputs.key.shape
    arguments = common | inputs.arguments(inputs.tiles.key_gradients)
    n_tiles = triton.cdiv(inputs.n_slots or seq, arguments["KEYS"])
    tiles, device = inputs.tiles.key_gradients, device_info(inputs.key.device)
    row_bytes = (arguments["WIDTH"] + arguments["WIDTH_V"]) * inputs.key.element_size()
    n_resident = programs_per_multiprocessor(tiles, row_bytes, device)
    n_splits = _n_splits(inputs, n_tiles, n_resident * device.n_multiprocessors)
    dtype = None if n_splits == 1 else torch.float32
    d_key, d_value = (by_position(t, n_kv_heads, n_splits, dtype=dtype) for t in (inputs.key, inputs.value))
    kernel._key_gradients[batch * n_kv_heads, n_splits, n_tiles](
        table=_table(inputs, slot_of)["table"],
        d_key=d_key,
        d_value=d_value,
        HEADS=inputs.group // n_splits,
        # Where a multiprocessor has another program to run, it need not load ahead, which takes registers.
        COPIES=max(1, 32 * tiles.n_warps // tiles.keys) if n_resident == 1 else 0,
        **arguments,
    )
    # No program writes the rows of keys that no query sees.
    is_never_seen = inputs.evicted_at <= torch.arange(seq, device=d_key.device)
    return (
        _sum_splits(d_key, inputs.key.dtype, is_never_seen),
        _sum_splits(d_value, inputs.value.dtype, is_never_seen),
    )


def _with_prefetch(inputs: Inputs, tiles: Tiles) -> Tiles:
    """Return tiles with more stages in listed mode, where entries and then keys are prefetched."""
    return replace(tiles, n_stages=2 * tiles.n_stages - 1) if inputs.n_slots else tiles


def _n_splits(inputs: Inputs, n_tiles: int, n_at_once: int) -> int:
    """Return the programs that share the heads of a group, if so many run at the same time."""
    batch, n_kv_heads, seq, dim = inputs.key.shape
    dim_v = inputs.value.shape[-1]
    # Without lists a program's queries begin at its keys, half of the sequence on average.
    n_pairs = inputs.tiles.key_gradients.keys * seq * inputs.group * (1.0 if inputs.n_slots else 0.5)
    # Each split writes its gradients in float32, and the sum reads them.
    n_bytes = 2 * 4 * batch * n_kv_heads * seq * (dim + dim_v)
    return choose_n_splits(
        inputs.group,
        n_tiles * batch * n_kv_heads,
        n_at_once,
        work=4 * (dim + dim_v) * n_pairs,
        merge=FLOPS_PER_BYTE[inputs.key.dtype] * n_bytes / n_at_once,
    )


def _sum_splits(parts: Tensor, dtype: torch.dtype, is_zero: Tensor) -> Tensor:
    total = parts[0]
    if len(parts) > 1:
        # Summed in the order of memory, which the sum then keeps.
        total = parts.transpose(-3, -2).sum(0).to(dtype).transpose(-3, -2)
    return total.masked_fill_(is_zero[..., None], 0.0)


def _deltas(out: Tensor, d_out: Tensor, d_lse: Tensor) -> Float[Tensor, "batch head seq"]:
    """Return d_out·out - d_lse of each query."""
    batch, n_heads, seq, dim_v = out.shape
    delta = torch.empty(batch, n_heads, seq, dtype=torch.float32, device=out.device)
    queries = min(64, DELTA_TILE // _width(dim_v))
    kernel._delta[batch * n_heads, triton.cdiv(seq, queries)](
        **_with_strides(out=out, d_out=d_out),
        d_lse=d_lse,
        delta=delta,
        n_heads=n_heads,
        seq=seq,
        DIM_V=dim_v,
        WIDTH_V=_width(dim_v),
        QUERIES=queries,
    )
    return delta


def _table(inputs: Inputs, slot_of: Tensor | None = None) -> dict[str, Tensor | None]:
    """Return the keys cached in each block of queries [batch head block slot]; None in contiguous mode.

    With `slot_of` each key stands in its slot, and empty slots are 0. Without it the keys are a list;
    `n_listed` [batch head block 2] has its length, and how many at its start all queries of the block see.
    """
    if not inputs.n_slots:
        return {"table": None, "n_listed": None}
    batch, n_tables, seq = inputs.evicted_at.shape
    shape = (batch, n_tables, inputs.n_blocks)
    allocate = inputs.evicted_at.new_empty if slot_of is None else inputs.evicted_at.new_zeros
    table = allocate(*shape, inputs.n_slots)
    n_listed = inputs.evicted_at.new_empty(*shape, 2) if slot_of is None else None
    kernel._table[batch * n_tables, inputs.n_blocks](
        evicted_at=inputs.evicted_at,
        slot_of=slot_of,
        table=table,
        n_listed=n_listed,
        seq=seq,
        n_slots=inputs.n_slots,
        BLOCK=inputs.block,
        PLACED=slot_of is not None,
        CHUNK=ENTRIES_AT_A_TIME,
    )
    return {"table": table, "n_listed": n_listed}


def by_position(template: Tensor, n_heads: int, *lead: int, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate [*lead batch head seq dim], in memory [*lead batch seq head dim] as projections use it."""
    batch, _, seq, dim = template.shape
    shape = (*lead, batch, seq, n_heads, dim)
    return torch.empty(shape, dtype=dtype or template.dtype, device=template.device).transpose(-3, -2)


def _with_strides(**tensors: Tensor) -> dict[str, Tensor | int]:
    """Return the tensors, and their strides of batch, head and position, by the kernels' names."""
    return tensors | {
        f"{name}_{axis}": step
        for name, tensor in tensors.items()
        for axis, step in zip("bhs", tensor.stride()[:3], strict=True)
    }


def _width(dim: int) -> int:
    """Return the columns of a tile: a power of two, at least the 16 of a matrix instruction."""
    return max(16, triton.next_power_of_2(dim))
