"""When each sequence writes and compacts: known from the prompt lengths, without asking the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lit_rlkv.kvcache.spec import CacheSpec


@dataclass(frozen=True)
class DecodeStep:
    """Where this step's keys go, and which rows are full after it."""

    column: int
    """Column of the token being decoded, the same in every row."""
    slot: Int[Tensor, " batch"]
    is_live: Bool[Tensor, "batch slot"]
    due: Int[Tensor, " due"] | None
    """Rows to compact after attention; None if there are none."""


@dataclass(frozen=True)
class CacheSchedule:
    """Fill levels of every row at every step, on the device before the first token."""

    n_prompt_columns: int
    prompt_fill: Int[Tensor, " batch"]
    """Slots taken after prefill and its compaction."""
    prompt_due: Int[Tensor, " due"] | None
    """Rows whose prompt is longer than the budget."""
    slots: Int[Tensor, "step batch"]
    due_rows: tuple[Int[Tensor, " _"] | None, ...]
    """Of each step, the rows to compact after it."""
    slot_index: Int[Tensor, " slot"]

    def step(self, n_decoded: int) -> DecodeStep:
        """The step that decodes the token at column `n_prompt_columns + n_decoded`."""
        slot = self.slots[n_decoded]
        return DecodeStep(
            column=self.n_prompt_columns + n_decoded,
            slot=slot,
            is_live=self.slot_index <= slot[:, None],
            due=self.due_rows[n_decoded],
        )


def plan_schedule(
    spec: CacheSpec, prompt_lens: Sequence[int], n_prompt_columns: int, n_steps: int, device: torch.device
) -> CacheSchedule:
    """Each row fills up to `budget + interval` on its own length, then falls back to `budget`."""
    n_slots = spec.n_slots(n_prompt_columns + n_steps)
    budget = n_slots if spec.is_dense else spec.budget
    lens = torch.tensor(prompt_lens)
    fill = lens.clamp(max=budget)
    # A row climbs from its fill to n_slots once, then from budget to n_slots again and again.
    written = fill + torch.arange(n_steps)[:, None]
    period = max(n_slots - budget, 1)
    slots = torch.where(written < n_slots, written, budget + (written - n_slots) % period)
    is_due = (slots + 1 == n_slots) & (not spec.is_dense)
    return CacheSchedule(
        n_prompt_columns=n_prompt_columns,
        prompt_fill=fill.to(device),
        prompt_due=_rows(lens > budget, device),
        slots=slots.to(device),
        due_rows=tuple(_rows(due, device) for due in is_due),
        slot_index=torch.arange(n_slots, device=device),
    )


def _rows(is_due: Bool[Tensor, " batch"], device: torch.device) -> Int[Tensor, " due"] | None:
    return is_due.nonzero().flatten().to(device) if bool(is_due.any()) else None
