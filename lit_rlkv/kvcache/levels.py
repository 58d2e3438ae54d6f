"""Fill levels of a cache's rows, counted on the host from the prompt lengths."""

from collections.abc import Sequence

import torch

from lit_rlkv.kvcache.spec import CacheSpec

IDLE = -(2**40)
"""Level of a row without a sequence: it never becomes full."""


class FillLevels:
    """Counts the keys of every row on the host, to know when to compact without waiting for the device.

    A row fills up to `budget + interval` keys, is compacted to `budget`, and fills up again. A finished row
    writes nothing, but the host counts on until it knows; a compaction may then find nothing to do.
    """

    def __init__(self, spec: CacheSpec, n_rows: int, n_slots: int) -> None:
        self.budget = n_slots if spec.is_dense else spec.budget
        self.full = IDLE if spec.is_dense else n_slots
        self.level = torch.full((n_rows,), IDLE)

    def start(self, rows: Sequence[int], prompt_lens: Sequence[int]) -> None:
        """Set the levels of rows after prefill, which keeps at most `budget` keys of a prompt."""
        self.level[list(rows)] = torch.tensor(prompt_lens).clamp(max=self.budget)

    def stop(self, rows: Sequence[int]) -> None:
        """Mark rows as finished."""
        self.level[list(rows)] = IDLE

    def step(self) -> bool:
        """Count one more key in each row; return True if some row may be full."""
        self.level += 1
        is_full = self.level == self.full
        self.level[is_full] = self.budget
        return bool(is_full.any())
