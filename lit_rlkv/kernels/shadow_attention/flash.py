"""torch's flash attention over sequences of different lengths: forward with log-sum-exp, and backward."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """The sequences of a call, whose queries and keys stand one after another."""

    query_starts: Int[Tensor, " sequence_and_end"]
    key_starts: Int[Tensor, " sequence_and_end"]
    longest: int
    """Most queries of a sequence, or more."""
    most_keys: int
    is_causal: bool
    """The last query sees all keys, the one before it all but the last, and so on; else all see all."""
    window: int
    """Last keys that a query sees; 0: all."""
    scaling: float


class Library(Protocol):
    """Flash attention on one kind of device, of queries [query, head, dim] and keys [key, kv_head, dim]."""

    dtypes: tuple[torch.dtype, ...]
    has_windows: bool

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp [query, head]."""

    def backward(
        self, d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients to query, key and value, of the softmax that `out` and `lse` are of."""


class _Cuda:
    dtypes = (torch.float16, torch.bfloat16)
    has_windows = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._flash_attention_forward(
            query, key, value, *self._lengths(call), 0.0, call.is_causal, False, **self._options(call)
        )
        return out, lse.mT

    def backward(
        self, d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        without_dropout = (
            torch.zeros(2, dtype=torch.uint64, device=query.device),
            torch.empty(0, dtype=torch.uint64, device=query.device),
        )
        d_query, d_key, d_value = aten._flash_attention_backward(
            d_out,
            query,
            key,
            value,
            out,
            lse.mT.contiguous(),
            *self._lengths(call),
            0.0,
            call.is_causal,
            *without_dropout,
            **self._options(call),
        )
        return d_query, d_key, d_value

    def _lengths(self, call: Call) -> tuple[Tensor, Tensor, int, int]:
        # Where the longest has 1 query, the library would lay the log-sum-exp out in another way.
        return call.query_starts, call.key_starts, max(call.longest, 2), call.most_keys

    def _options(self, call: Call) -> dict[str, float | int]:
        left, right = call.window - 1 if call.window else -1, 0 if call.is_causal else -1
        return {"scale": call.scaling, "window_size_left": left, "window_size_right": right}


class _Cpu:
    """Sequences of equal shapes that follow each other are one call."""

    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    has_windows = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for batch in _batches(query, key, call):
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                batch.of_queries(query),
                batch.of_keys(key),
                batch.of_keys(value),
                is_causal=call.is_causal,
                scale=call.scaling,
            )
            outs.append(out.transpose(1, 2).flatten(0, 1))
            lses.append(lse.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs), torch.cat(lses)

    def backward(
        self, d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = []
        for batch in _batches(query, key, call):
            gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                batch.of_queries(d_out),
                batch.of_queries(query),
                batch.of_keys(key),
                batch.of_keys(value),
                batch.of_queries(out),
                batch.of_queries(lse),
                0.0,
                call.is_causal,
                scale=call.scaling,
            )
            found.append([each.transpose(1, 2).flatten(0, 1) for each in gradients])
        d_query, d_key, d_value = map(torch.cat, zip(*found, strict=True))
        return d_query, d_key, d_value


@dataclass(frozen=True)
class _Batch:
    n_sequences: int
    queries: slice
    keys: slice

    def of_queries(self, values: Float[Tensor, "query head *dim"]) -> Float[Tensor, "sequence head row *dim"]:
        return values[self.queries].unflatten(0, (self.n_sequences, -1)).transpose(1, 2)

    def of_keys(self, values: Float[Tensor, "key head dim"]) -> Float[Tensor, "sequence head column dim"]:
        return values[self.keys].unflatten(0, (self.n_sequences, -1)).transpose(1, 2)


def _batches(query: Tensor, key: Tensor, call: Call) -> Iterator[_Batch]:
    shapes = torch.stack([call.query_starts.diff(), call.key_starts.diff()], dim=1)
    shapes, counts = shapes.unique_consecutive(dim=0, return_counts=True)
    begins = [0, 0]
    for count, sizes in zip(counts.tolist(), shapes.tolist(), strict=True):
        ends = [begin + count * size for begin, size in zip(begins, sizes, strict=True)]
        yield _Batch(count, *map(slice, begins, ends))
        begins = ends


LIBRARIES: dict[str, Library] = {"cuda": _Cuda(), "cpu": _Cpu()}
"""By type of device."""
MAX_HEAD_DIM = 256
"""Most dimensions of a head; on CUDA also a multiple of 8."""


def fits(device: str, dtype: torch.dtype, width: int, softcap: float | None) -> bool:
    """Return True if the library of the device takes heads of `width` dimensions in this dtype."""
    library = LIBRARIES.get(device)
    if library is None or softcap is not None or dtype not in library.dtypes:
        return False
    return device == "cpu" or (width % 8 == 0 and width <= MAX_HEAD_DIM)
