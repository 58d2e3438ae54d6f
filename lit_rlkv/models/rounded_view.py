"""RoundedView: the dtype and the record by which a learner rounds as the rollout's cache did."""

from dataclasses import dataclass, replace

from jaxtyping import UInt8
from torch import Tensor

from lit_rlkv.kernels.backend import to_autocast_dtype
from lit_rlkv.kernels.rounding import record_bytes, rounded
from lit_rlkv.models.flat_tokens import FlatTokens
from lit_rlkv.types import Rollout


@dataclass(frozen=True)
class RoundedView:
    """Dtype of the rollout's cache, and the record of its codes."""

    dtype: str
    record: UInt8[Tensor, "row layer kv_head byte column"]

    @classmethod
    def of(cls, rollout: Rollout, *, shadow: bool, n_columns: int | None = None) -> "RoundedView | None":
        """Return the view of a learner of the first columns; None if it does not round."""
        if rollout.cache_dtype is None or not shadow:
            return None
        assert rollout.rounding_record is not None, "generate records the codes of such a cache"
        return cls(rollout.cache_dtype, rollout.rounding_record[..., :n_columns])

    def flatten(self, flat: FlatTokens) -> "RoundedView":
        """Return the view of a flat sequence of the tokens."""
        return replace(self, record=flat.flatten_columns(self.record))

    def stacked(self, n_passes: int) -> "RoundedView":
        """Return the view of the rows, so many times over."""
        return replace(self, record=self.record.repeat(n_passes, 1, 1, 1, 1))

    def apply(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rounded keys and values [row, kv_head, column, dim] of a layer."""
        key, value = to_autocast_dtype(key, value)
        record = self.record[:, layer, :: self.record.shape[2] // key.shape[1]].movedim(2, 3)
        n_key, n_value = (record_bytes(each.shape[-1], self.dtype) for each in (key, value))
        parts = record[..., :n_key], record[..., n_key : n_key + n_value]
        return rounded(key, self.dtype, parts[0]), rounded(value, self.dtype, parts[1])


def record_in(view: RoundedView | None) -> UInt8[Tensor, "row layer kv_head byte column"] | None:
    """Return the record of a view; None without one."""
    return None if view is None else view.record
