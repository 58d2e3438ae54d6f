"""Slots: keys or values of a layer, as numbers, or as codes and scales that move together."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from lit_rlkv.kernels.quantization import dequantize, group_of, quantize, record_of


@dataclass(frozen=True)
class Slots:
    """One vector in each slot of some rows and KV heads. A pool is written in place."""

    parts: tuple[Shaped[Tensor, "row kv_head slot _"], ...]
    """The numbers; or codes, then scales."""
    kv_dtype: str | None
    dtype: torch.dtype
    """Dtype of the numbers."""
    balance: Float[Tensor, "kv_head 1 dim"] | None = None
    """Powers of two that the numbers were divided by before they became codes."""

    @classmethod
    def of(cls, numbers: Tensor, kv_dtype: str | None, balance: Tensor | None = None) -> "Slots":
        """Return vectors as a cache stores them."""
        if kv_dtype is None:
            return cls((numbers,), None, numbers.dtype)
        if balance is not None:
            balance = balance[:, None].to(numbers)
        codes = quantize(numbers if balance is None else numbers / balance, kv_dtype)
        return cls(codes, kv_dtype, numbers.dtype, balance)

    def read(self) -> Tensor:
        """Return the numbers: the pool itself, or a copy of what its codes stand for."""
        if self.kv_dtype is None:
            return self.parts[0]
        codes, scales = self.parts
        numbers = dequantize(codes, scales, self.kv_dtype, self.dtype)
        return numbers if self.balance is None else numbers * self.balance

    def record(self) -> Tensor:
        """Return the record of the codes, by which a learner finds them again."""
        assert self.kv_dtype is not None
        codes, scales = self.parts
        return record_of(codes, scales, self.kv_dtype, self.code_group)

    @property
    def code_group(self) -> int:
        """Codes that share check bits in the record."""
        assert self.kv_dtype is not None
        return group_of(self.kv_dtype, self.dtype)

    def map(self, change: Callable[..., Tensor], *others: "Slots") -> "Slots":
        """Return `change` of each part, and of the same part of the others."""
        parts = zip(self.parts, *(other.parts for other in others), strict=True)
        return replace(self, parts=tuple(change(*each) for each in parts))

    def first(self, n: int | None) -> "Slots":
        """Return a view of the first slots; None: of all."""
        return self.map(lambda part: part[:, :, :n])

    def pool(self, n_rows: int, n_slots: int) -> "Slots":
        """Allocate a pool for such vectors; zeroed, because NaN in an unused slot could spread."""
        return self.map(lambda part: part.new_zeros(n_rows, part.shape[1], n_slots, part.shape[3]))

    def put(self, rows: Int[Tensor, " row"] | slice, new: "Slots") -> None:
        """Copy vectors to the first slots of these rows."""
        for part, given in zip(self.parts, new.parts, strict=True):
            part[rows, :, : given.shape[2]] = given

    def write(self, places: Int[Tensor, " place"], new: "Slots") -> None:
        """Write one vector of each row and head to these slots of the flattened pool."""
        for part, given in zip(self.parts, new.parts, strict=True):
            part.view(-1, part.shape[-1]).index_copy_(0, places, given.reshape(-1, given.shape[-1]))

    def widened(self, rows: Int[Tensor, " kept"], n_slots: int) -> "Slots":
        """Return a copy of some rows with more slots."""
        wider = self.pool(len(rows), n_slots)
        wider.put(slice(None), self.map(lambda part: part[rows]))
        return wider

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """The scales; empty for numbers."""
        return self.parts[1:]

    @property
    def shape(self) -> torch.Size:
        """Rows, KV heads, slots, and numbers or bytes of a vector."""
        return self.parts[0].shape

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
