import pytest
import torch
from torch import Tensor

from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.schedule import CacheSchedule, plan_schedule

CPU = torch.device("cpu")


def spec_of(budget: int, interval: int) -> CacheSpec:
    return CacheSpec(policy="streaming", budget=budget, interval=interval, sink=1, window=2)


def due_lists(schedule: CacheSchedule) -> list[list[int]]:
    return [[] if due is None else due.tolist() for due in schedule.due_rows]


def test_fill_levels_of_ragged_prompts_match_a_worked_example():
    # Budget 4, interval 2: six slots, so slot 5 is the last, and the row that writes it falls back to 4 keys.
    # The prompt of 7 was compacted to 4 at prefill, that of 4 fits exactly, that of 2 has two slots to spare.
    schedule = plan_schedule(spec_of(4, 2), [2, 4, 7], n_prompt_columns=7, n_steps=6, device=CPU)
    assert schedule.prompt_fill.tolist() == [2, 4, 4]
    assert schedule.prompt_due is not None
    assert schedule.prompt_due.tolist() == [2]
    assert schedule.slots.T.tolist() == [[2, 3, 4, 5, 4, 5], [4, 5, 4, 5, 4, 5], [4, 5, 4, 5, 4, 5]]
    assert due_lists(schedule) == [[], [1, 2], [], [0, 1, 2], [], [0, 1, 2]]


def test_a_step_knows_its_column_and_which_slots_hold_keys():
    schedule = plan_schedule(spec_of(4, 2), [2, 7], n_prompt_columns=7, n_steps=6, device=CPU)
    step = schedule.step(2)
    assert step.column == 9
    assert step.slot.tolist() == [4, 4]
    assert step.is_live.int().tolist() == [[1, 1, 1, 1, 1, 0]] * 2
    assert schedule.step(0).is_live.int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]]


def test_a_prompt_between_budget_and_all_slots_is_compacted_at_prefill():
    schedule = plan_schedule(spec_of(4, 3), [4, 5], n_prompt_columns=5, n_steps=1, device=CPU)
    assert schedule.prompt_due is not None
    assert schedule.prompt_due.tolist() == [1]


def test_with_an_interval_of_one_every_step_compacts_a_full_row():
    schedule = plan_schedule(spec_of(4, 1), [4, 3], n_prompt_columns=4, n_steps=3, device=CPU)
    assert schedule.slots.T.tolist() == [[4, 4, 4], [3, 4, 4]]
    assert due_lists(schedule) == [[0], [0, 1], [0, 1]]


def test_a_dense_cache_appends_and_is_never_due():
    schedule = plan_schedule(CacheSpec.dense(), [2, 5], n_prompt_columns=5, n_steps=4, device=CPU)
    assert schedule.prompt_due is None
    assert schedule.slots.T.tolist() == [[2, 3, 4, 5], [5, 6, 7, 8]]
    assert due_lists(schedule) == [[], [], [], []]


def count_by_hand(spec: CacheSpec, prompt_len: int, n_steps: int) -> tuple[list[int], list[bool]]:
    n_keys, slots, dues = min(prompt_len, spec.budget), [], []
    for _ in range(n_steps):
        slots.append(n_keys)
        n_keys += 1
        dues.append(n_keys == spec.budget + spec.interval)
        n_keys = spec.budget if dues[-1] else n_keys
    return slots, dues


@pytest.mark.parametrize("interval", [1, 2, 5, 8])
def test_every_row_counts_its_own_keys(interval: int):
    spec, lens = spec_of(6, interval), list(range(1, 20))
    schedule = plan_schedule(spec, lens, n_prompt_columns=19, n_steps=30, device=CPU)
    is_due = torch.zeros(30, len(lens), dtype=torch.bool)
    for step, rows in enumerate(due_lists(schedule)):
        is_due[step, rows] = True
    by_hand = [count_by_hand(spec, length, 30) for length in lens]
    expected_slots: Tensor = torch.tensor([slots for slots, _ in by_hand]).T
    assert torch.equal(schedule.slots, expected_slots)
    assert torch.equal(is_due, torch.tensor([dues for _, dues in by_hand]).T)
