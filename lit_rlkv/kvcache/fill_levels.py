"""FillLevels: the keys of every row, counted on the host."""

from collections.abc import Sequence

import torch

from lit_rlkv.kvcache.spec import CacheSpec

IDLE = -(2**40)
"""Level of a row without a sequence; it never exceeds a budget."""
NO_BUDGET = 2**40


class FillLevels:
    """Counts the keys of every row on the host, to know when to compact without waiting for the device.

    Every `interval` decode steps since its last feed, a row above `budget` is compacted to it. So rows that
    start together are compacted together, whatever the lengths of their prompts, and each as it would be
    alone. A finished row writes nothing, but the host counts on until it knows; a compaction may then find
    nothing to do.

    Args:
        n_slots: slots of a row beside those of protected prompts, for each group of layers.
        budgets: of the groups.
    """

    def __init__(self, spec: CacheSpec, n_rows: int, n_slots: Sequence[int], budgets: Sequence[int]) -> None:
        self.interval = spec.interval
        # With slots for whole sequences within the budget, no row ever exceeds it.
        sizes = zip(n_slots, budgets, strict=True)
        self.budgets = torch.tensor(
            [[NO_BUDGET if spec.is_dense or slots <= budget else budget] for slots, budget in sizes]
        )
        self.most = self.budgets.repeat(1, n_rows)
        """Keys that a compaction leaves in each row, by group."""
        self.level = torch.full((len(self.budgets), n_rows), IDLE)
        self.n_decoded = torch.zeros(n_rows, dtype=torch.long)
        self.n_tokens = torch.full((n_rows,), IDLE)
        """Tokens of each row, evicted or not."""

    def start(
        self, rows: Sequence[int], n_tokens: Sequence[int], n_protected: Sequence[int] | int = 0
    ) -> None:
        """Set the levels of rows after a feed, which keeps at most `budget` keys of all tokens so far.

        Args:
            n_protected: keys that each row keeps beside its budget.
        """
        index = list(rows)
        self.most[:, index] = self.budgets + torch.tensor(n_protected)
        self.n_tokens[index] = torch.tensor(n_tokens)
        self.level[:, index] = torch.minimum(self.n_tokens[index], self.most[:, index])
        self.n_decoded[index] = 0

    def stop(self, rows: Sequence[int]) -> None:
        """Mark rows as finished."""
        self.level[:, list(rows)] = self.n_tokens[list(rows)] = IDLE

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all other rows; these are numbered anew, in the order given."""
        self.level, self.n_decoded = self.level[:, list(rows)], self.n_decoded[list(rows)]
        self.n_tokens, self.most = self.n_tokens[list(rows)], self.most[:, list(rows)]

    @property
    def highest(self) -> list[int]:
        """Keys of the fullest row, for each group; 0 if all are idle."""
        return [max(int(level), 0) for level in self.level.amax(dim=1).tolist()]

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 if all are idle."""
        return max(int(self.n_tokens.max()), 0)

    def step(self) -> bool:
        """Count one more key in each row; return True if some row may be due for a compaction."""
        self.level += 1
        self.n_decoded += 1
        self.n_tokens += 1
        is_due = (self.n_decoded % self.interval == 0) & (self.level > self.most)
        self.level[is_due] = self.most[is_due]
        return bool(is_due.any())
