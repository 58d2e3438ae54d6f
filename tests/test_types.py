"""Every operation on a batch, for every part of it, against lists of lists; ragged records among them."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from lit_rlkv.models.flat_tokens import FlatTokens
from lit_rlkv.types import (
    MOST_NARROW,
    NEVER,
    OWN_CHOICE,
    Codes,
    Record,
    Rollout,
    SamplingMasks,
    times_dtype,
    wide,
)

SETS = [
    [[], [], [3, 1], [4], []],
    [[], [2], [0, 5, 7], [], []],
    [[], [], [], [6], [1, 2]],
]
"""Ids of each column of each row; prompts and padding have none."""
TIMES = [
    [[3, 4, NEVER, NEVER, 0], [NEVER, 3, 5, NEVER, NEVER]],
    [[2, NEVER, NEVER, 0, 0], [NEVER, 2, 4, 0, 0]],
    [[0, NEVER, 4, NEVER, NEVER], [0, 0, NEVER, 5, NEVER]],
]
"""Evictions of each layer of each row, some of them of padding and some after the end of the row."""
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]).bool()
ENDS = [4, 3, 5]


@dataclass(frozen=True)
class WithOneMore(Record):
    """A record with a part that no operation knows by name."""

    one_more: Int[Tensor, "batch thing seq"] | None = None


def masks_of(sets: list[list[list[int]]]) -> SamplingMasks:
    ids = [token for row in sets for column in row for token in column]
    return SamplingMasks(
        torch.tensor([[len(column) for column in row] for row in sets], dtype=torch.int32),
        torch.tensor(ids, dtype=torch.int32),
    )


def sets_of(masks: SamplingMasks) -> list[list[list[int]]]:
    ids = iter(masks.token_ids.tolist())
    found = [[[next(ids) for _ in range(n)] for n in row] for row in masks.counts.tolist()]
    assert next(ids, None) is None
    return found


def make_record(**changes: Any) -> WithOneMore:
    values = {
        "evicted_at": torch.tensor(TIMES, dtype=torch.int32)[:, :, None],
        "sampling_masks": masks_of(SETS),
        "codes": Codes("int8", 1, torch.arange(120, dtype=torch.uint8).view(3, 2, 1, 4, 5)),
        "expert_ids": torch.arange(60, dtype=torch.int8).view(3, 2, 2, 5),
        "one_more": torch.arange(30).view(3, 2, 5),
    }
    return WithOneMore(**values | changes)


def make_rollout(**changes: Any) -> Rollout:
    return Rollout(
        input_ids=torch.arange(15).view(3, 5),
        attention_mask=MASK,
        response_mask=masks_of(SETS).counts > 0,
        rollout_logps=torch.arange(15.0).view(3, 5),
        record=make_record(**changes),
        kv_bytes=7,
        temperature=0.7,
    )


Rows = list[list[Any]]
"""The values of each column of each row."""


def parts_of(batch: Rollout | Record) -> dict[str, Rows]:
    """Return all parts of a batch but those that are None or one number, by name."""
    found: dict[str, Rows] = {}
    for name, part in ((one.name, getattr(batch, one.name)) for one in fields(batch)):
        if isinstance(part, Record):
            found |= parts_of(part)
        elif isinstance(part, SamplingMasks):
            found[name] = sets_of(part)
        elif isinstance(part, Codes | Tensor):
            part = part.record if isinstance(part, Codes) else part
            found[name] = (wide(part) if name == "evicted_at" else part).movedim(-1, 1).tolist()
    return found


def each(change: Callable[[Any], Any], cell: Any) -> Any:
    """Change every number of a cell, which may be lists of lists."""
    return [each(change, part) for part in cell] if isinstance(cell, list) else change(cell)


def later(cell: Any, n_columns: int) -> Any:
    """Move the evictions of a cell; columns before the first one are all 0."""
    return each(lambda time: time if time in (0, NEVER) else max(time + n_columns, 0), cell)


def padding(name: str, cell: Any) -> Any:
    if name == "sampling_masks":
        return []
    return each(lambda _: OWN_CHOICE if name == "expert_ids" else 0, cell)


PICKED = [2, 0, 2]
COLUMNS = [[2, 3, 4, 0], [1, 2, 3, 4], [2, 3, 4, 0]]
"""New columns of these rows: they begin at their first token or after it, and wrap around at the end."""


def in_new_columns(name: str, rows: Rows) -> Rows:
    return [
        [later(rows[row][c], -columns[0]) if name == "evicted_at" else rows[row][c] for c in columns]
        for row, columns in zip(PICKED, COLUMNS, strict=True)
    ]


def padded(name: str, rows: Rows) -> Rows:
    n_left, n_right = 2, 1
    found = [[later(cell, n_left) if name == "evicted_at" else cell for cell in row] for row in rows]
    empty = padding(name, rows[0][0])
    return [[*[empty] * n_left, *row, *[empty] * n_right] for row in found]


Operation = tuple[Callable[[Any], Any], Callable[[str, Rows], Rows]]
"""What is done to a batch, and what becomes of a part of it."""
OPERATIONS: dict[str, Operation] = {
    "rows": (lambda b: b.rows(torch.tensor(PICKED)), lambda _, rows: [rows[row] for row in PICKED]),
    "rows of a slice": (lambda b: b.rows(slice(1, 3)), lambda _, rows: rows[1:]),
    "no rows": (lambda b: b.rows(torch.tensor([], dtype=torch.long)), lambda *_: []),
    "select": (lambda b: b.select(torch.tensor(PICKED), torch.tensor(COLUMNS)), in_new_columns),
    "padded": (lambda b: b.padded(1, 2), padded),
    "cat": (
        lambda b: b.cat([b, b.rows(torch.tensor(PICKED))]),
        lambda _, rows: rows + [rows[row] for row in PICKED],
    ),
    "another device": (lambda b: b.to("cpu"), lambda _, rows: rows),
}


def narrowed(rollout: Rollout) -> Rollout:
    return rollout.with_record(evicted_at=rollout.record.evicted_at.to(torch.int16))


@pytest.mark.parametrize("form", [lambda rollout: rollout, narrowed])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_operation_forgets_a_part_of_a_rollout(operation: str, form: Callable[[Rollout], Rollout]):
    parts, rollout = parts_of(make_rollout()), form(make_rollout())
    settings = {"record", "kv_bytes", "temperature"}
    assert parts.keys() == {one.name for kind in (Rollout, WithOneMore) for one in fields(kind)} - settings
    change, expected = OPERATIONS[operation]
    result = change(rollout)
    assert parts_of(result) == {name: expected(name, rows) for name, rows in parts.items()}
    assert (result.kv_bytes, result.temperature, result.record.codes.dtype) == (7, 0.7, "int8")


def test_rows_and_columns_of_every_part_are_told_apart():
    for name, rows in parts_of(make_rollout()).items():
        assert rows[1:] + rows[:1] != rows, name
        assert [row[1:] + row[:1] for row in rows] != rows, name
    wrong = SamplingMasks(masks_of(SETS).counts[1:2], masks_of(SETS).token_ids[:4])
    assert sets_of(wrong) != SETS[1:2]


def test_all_tensors_go_to_another_device():
    tensors = make_rollout().to("meta").tensors()
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 10  # two of them of the sampling masks


@pytest.mark.parametrize("name", ["sampling_masks", "codes", "expert_ids", "one_more"])
def test_a_part_that_only_some_batches_have_is_not_lost_silently(name: str):
    both = [make_rollout(), make_rollout(**{name: None})]
    for batches in (both, both[::-1]):
        with pytest.raises(AssertionError, match="only some batches have"):
            Rollout.cat(batches)


def test_the_bytes_of_records_are_counted():
    # 3 · 2 · 1 · 5 eviction times and 15 counts with 10 ids, of 4 bytes each; 3 · 2 · 1 · 4 · 5 bytes of
    # codes; 3 · 2 · 2 · 5 experts of 1 byte; 3 · 2 · 5 numbers of 8 bytes
    sizes = {"evicted_at": 120, "sampling_masks": 100, "codes": 120, "expert_ids": 60, "one_more": 240}
    assert make_record().part_bytes == sizes
    assert Record(make_record().evicted_at).part_bytes == {"evicted_at": 120}


def test_a_rollout_without_records_keeps_none_of_them():
    emptied = make_rollout().without_records()
    assert emptied.record.part_bytes == {"evicted_at": 0}
    rows = emptied.rows(torch.tensor(PICKED))
    assert len(Rollout.cat([rows, emptied]).evicted_at) == len(rows.input_ids) + 3


def as_seen(times: Rows) -> Rows:
    """Return evictions as a learner replays them: none after the end of its row, and 0 on padding."""
    return [
        [
            each(lambda time, end=end: min(time, end), cell) if is_token else padding("", cell)
            for cell, is_token in zip(row, mask, strict=True)
        ]
        for row, mask, end in zip(times, MASK.tolist(), ENDS, strict=True)
    ]


DENSE = [
    [[[end if is_token else 0]] for is_token in mask] for mask, end in zip(MASK.tolist(), ENDS, strict=True)
]
"""One layer and KV head for all."""


@pytest.mark.parametrize("routing", [True, False])
@pytest.mark.parametrize("shadow", [True, False])
def test_a_view_has_what_a_forward_replays(shadow: bool, routing: bool):
    record, parts = make_record(), parts_of(make_record())
    view = record.view(MASK, shadow=shadow, routing=routing)
    expected = {"evicted_at": as_seen(parts["evicted_at"]) if shadow else DENSE}
    expected |= {"codes": parts["codes"]} if shadow else {}
    expected |= {"expert_ids": parts["expert_ids"]} if routing else {}
    assert parts_of(view) == expected
    assert parts_of(view.until(-2)) == {name: [row[:-2] for row in rows] for name, rows in expected.items()}
    assert parts_of(Record.dense(MASK)) == {"evicted_at": DENSE}


def test_a_flat_sequence_has_all_parts_of_its_tokens_and_evictions_of_the_rows():
    record = replace(make_record(), sampling_masks=None)
    cells, nothing = [0, 3, 6, 14], torch.zeros(0, dtype=torch.long)
    tokens = FlatTokens(
        cells=torch.tensor(cells),
        place=torch.zeros(3, 5, dtype=torch.long),
        members=torch.zeros(0, 3, dtype=torch.bool),
        n_columns=0,
        shared=nothing,
        shared_cells=nothing,
    )
    expected = {
        name: [[rows[cell // 5][cell % 5] for cell in cells]] for name, rows in parts_of(record).items()
    }
    expected["evicted_at"] = parts_of(record)["evicted_at"]
    assert parts_of(tokens.of_record(record)) == expected


@pytest.mark.parametrize("name", ["evicted_at", "codes", "expert_ids", "one_more"])
def test_prompts_are_equal_only_if_every_part_is(name: str):
    record = replace(make_record(), sampling_masks=None).rows(torch.tensor([0, 0]))
    n_prompt = torch.tensor([3, 3])

    def is_equal(column: int) -> bool:
        """True if the prompts are equal with another value in this column of the second row."""
        changed = record.map_tensors(torch.clone)
        part = getattr(changed, name)
        values = part.record if name == "codes" else part
        values[1, ..., column] = 1
        return all(torch.equal(table[0], table[1]) for table in changed.of_prompts(n_prompt))

    assert not is_equal(0)
    assert is_equal(3)


def test_evictions_after_the_prompt_are_equal_for_it():
    record = Record(make_record().evicted_at[:2, :1])  # at 3, 4 and never; at 2 and never
    record.evicted_at[1, 0, 0] = torch.tensor([5, 3, 4, NEVER, 0])
    for n_prompt, expected in ((3, True), (4, False)):
        (table,) = record.of_prompts(torch.tensor([n_prompt, n_prompt]))
        assert torch.equal(table[0], table[1]) == expected


LENGTHS = [32_766, 32_767, 32_768, MOST_NARROW - 1, MOST_NARROW, MOST_NARROW + 1]
"""Columns around what a signed and an unsigned number of 16 bits can count."""


def long_rollout(n_columns: int) -> tuple[Rollout, Tensor]:
    """Return a rollout as it is kept, with keys that die at the first and the last times, and the times."""
    times = (torch.arange(n_columns) + 1).repeat(2, 2, 1, 1)
    times[0, 0, 0, ::2], times[0, 1, 0, 5:], times[1, 0, 0, :-9] = NEVER, n_columns, n_columns - 1
    times[1, 1, 0, :3] = 0
    mask = torch.ones(2, n_columns, dtype=torch.bool)
    kept = Record(times.int().to(times_dtype(n_columns)))
    return Rollout(
        mask.long(), mask, mask & (torch.arange(n_columns) > 2), mask.float(), kept, 0
    ), times.int()


@pytest.mark.parametrize("n_columns", LENGTHS)
def test_times_kept_in_16_bits_come_back_bit_for_bit(n_columns: int):
    rollout, times = long_rollout(n_columns)
    assert rollout.record.evicted_at.dtype == (torch.int16 if n_columns <= 65_534 else torch.int32)
    assert torch.equal(rollout.evicted_at, times)
    assert all(torch.equal(rollout.evictions(layer), times[:, layer]) for layer in range(2))
    chosen = rollout.record.select(torch.tensor([1, 0]), torch.arange(n_columns).expand(2, -1))
    assert chosen.evicted_at.dtype == torch.int32
    assert torch.equal(chosen.evicted_at, times.flip(0))
    for n_left in (0, 1, 2):
        padded = rollout.padded(1, n_left)
        moved = times + n_left * ((times > 0) & (times != NEVER)).int()
        assert torch.equal(padded.evicted_at[..., n_left:-1], moved)
        assert not padded.evicted_at[..., :n_left].any()
        both = Rollout.cat([padded, padded.with_record(evicted_at=padded.evicted_at)])
        assert torch.equal(both.evicted_at, padded.evicted_at.repeat(2, 1, 1, 1))


def test_times_cut_to_16_bits_beyond_their_reach_would_not_come_back():
    _, times = long_rollout(MOST_NARROW + 2)
    assert not torch.equal(wide(times.to(torch.int16)), times)
