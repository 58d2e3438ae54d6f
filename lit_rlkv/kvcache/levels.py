"""How full the rows of a cache are: known from the prompt lengths, without asking the device."""

from collections.abc import Sequence

import torch

from lit_rlkv.kvcache.spec import CacheSpec

IDLE = -(2**40)
"""Level of a row that holds no sequence: never full, however many steps go by."""


class FillLevels:
    """The host's count of the keys of every row, for one purpose: to know after which steps to compact.

    A row climbs to `budget + interval` on its own length, falls back to `budget`, and climbs again. A row
    whose sequence has ended stands still on the device, which the host may not know yet: then it asks for a
    compaction that finds nothing to do.
    """

    def __init__(self, spec: CacheSpec, n_rows: int, n_slots: int) -> None:
        self.budget = n_slots if spec.is_dense else spec.budget
        self.full = IDLE if spec.is_dense else n_slots
        self.level = torch.full((n_rows,), IDLE)

    def start(self, rows: Sequence[int], prompt_lens: Sequence[int]) -> None:
        """Rows that have been prefilled, and compacted if their prompts exceeded the budget."""
        self.level[list(rows)] = torch.tensor(prompt_lens).clamp(max=self.budget)

    def stop(self, rows: Sequence[int]) -> None:
        """Rows whose sequences have ended."""
        self.level[list(rows)] = IDLE

    def step(self) -> bool:
        """Count the key that each row has just written; whether some row may be full now."""
        self.level += 1
        is_full = self.level == self.full
        self.level[is_full] = self.budget
        return bool(is_full.any())
