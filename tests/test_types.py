"""Batches with ragged records: rows, columns and sizes, against lists of lists."""

from dataclasses import dataclass, field, fields

import pytest
import torch
from jaxtyping import Int
from torch import Tensor

from lit_rlkv.types import NEVER, RECORD, Rollout, SamplingMasks

SETS = [
    [[], [], [3, 1], [4], []],
    [[], [2], [0, 5, 7], [], []],
    [[], [], [], [6], [1, 2]],
]
"""Ids of each column of each row; prompts and padding have none."""


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


@pytest.mark.parametrize("index", [[2, 0], [1, 1, 0], [], [2]], ids=str)
def test_rows_take_their_ids_along(index: list[int]):
    rows = masks_of(SETS).rows(torch.tensor(index, dtype=torch.long))
    assert sets_of(rows) == [SETS[row] for row in index]


def test_a_slice_of_rows_takes_its_ids_along():
    assert sets_of(masks_of(SETS).rows(slice(1, 3))) == SETS[1:]


def test_ids_of_another_row_are_noticed():
    wrong = SamplingMasks(masks_of(SETS).counts[1:2], masks_of(SETS).token_ids[:4])
    assert sets_of(wrong) != SETS[1:2]


def test_columns_move_without_the_ids():
    # Rows start at columns 1, 0 and 2, and wrap around at the end.
    columns = torch.tensor([[1, 2, 3, 4], [0, 1, 2, 3], [2, 3, 4, 0]])
    moved = masks_of(SETS).select(torch.arange(3), columns)
    assert sets_of(moved) == [
        [SETS[row][column] for column in picked] for row, picked in enumerate(columns.tolist())
    ]


def test_batches_are_padded_and_joined():
    first, second = masks_of(SETS), masks_of([row[:4] for row in SETS[:2]])
    joined = SamplingMasks.cat([first, second.padded(1)])
    assert sets_of(joined) == [*SETS, *([*row[:4], []] for row in SETS[:2])]


def make_rollout(**changes: object) -> Rollout:
    values: dict[str, object] = {
        "input_ids": torch.arange(15).view(3, 5),
        "attention_mask": torch.ones(3, 5, dtype=torch.bool),
        "response_mask": masks_of(SETS).counts > 0,
        "rollout_logps": torch.zeros(3, 5),
        "evicted_at": torch.full((3, 2, 1, 5), NEVER, dtype=torch.int32),
        "kv_bytes": 7,
        "temperature": 0.7,
        "sampling_masks": masks_of(SETS),
        "expert_ids": torch.arange(60, dtype=torch.int8).view(3, 2, 2, 5),
    }
    return Rollout(**(values | changes))  # type: ignore[arg-type]


def test_the_bytes_of_records_are_counted():
    # 3 · 2 · 1 · 5 eviction times and 15 counts with 10 ids, of 4 bytes each; 3 · 2 · 2 · 5 experts of 1 byte
    sizes = {"evicted_at": 120, "sampling_masks": 100, "expert_ids": 60}
    assert make_rollout().record_bytes == sizes
    assert make_rollout(sampling_masks=None, expert_ids=None).record_bytes == {"evicted_at": 120}
    assert make_rollout().without_records().record_bytes == {"evicted_at": 0}


@dataclass(frozen=True)
class WithOneMore(Rollout):
    """A rollout with a record that no operation knows by name."""

    one_more: Int[Tensor, "batch thing seq"] | None = field(default=None, metadata=RECORD)


def parts_of(rollout: Rollout) -> dict[str, Tensor]:
    """The tensors of a rollout by name, with ragged ones as a table."""
    found = {one.name: getattr(rollout, one.name) for one in fields(rollout)}
    masks = found.pop("sampling_masks")
    table = torch.full((*masks.counts.shape, 3), -1)
    table[torch.arange(3) < masks.counts[..., None]] = masks.token_ids.long()
    return {"sampling_masks": table.movedim(-1, 1)} | {
        name: part for name, part in found.items() if isinstance(part, Tensor)
    }


def test_no_operation_forgets_a_part_of_a_rollout():
    changes = {
        "attention_mask": torch.arange(5) >= torch.tensor([[0], [1], [2]]),
        "rollout_logps": torch.arange(15.0).view(3, 5),
        "evicted_at": torch.arange(30, dtype=torch.int32).view(3, 2, 1, 5),
        "cache_dtype": "int8",
        "rounding_record": torch.arange(120, dtype=torch.uint8).view(3, 2, 1, 4, 5),
    }
    values = {one.name: getattr(make_rollout(**changes), one.name) for one in fields(Rollout)}
    rollout = WithOneMore(**values, one_more=torch.arange(30).view(3, 2, 5))  # type: ignore[arg-type]
    parts, rows = parts_of(rollout), torch.tensor([2, 0])
    settings = {"kv_bytes", "temperature", "cache_dtype"}
    assert parts.keys() == {one.name for one in fields(WithOneMore)} - settings
    optional = {one.name for one in fields(WithOneMore) if one.default is None} - {"cache_dtype"}
    assert rollout.record_bytes.keys() == optional | {"evicted_at"}
    assert all(getattr(rollout.without_records(), name) is None for name in optional)
    columns = torch.arange(5).expand(2, -1)
    joined = WithOneMore.cat([rollout, rollout.rows(rows)])
    results = [joined, rollout.padded(2), rollout.select(rows, columns)]
    both, wide, moved = map(parts_of, results)
    assert {(result.temperature, result.cache_dtype) for result in results} == {(0.7, "int8")}
    for name, part in parts.items():
        assert not torch.equal(part[rows], part[:2]), name
        assert torch.equal(both[name], torch.cat([part, part[rows]])), name
        assert torch.equal(moved[name], part[rows]), name
        assert wide[name].shape == (*part.shape[:-1], 7), name
        assert torch.equal(wide[name][..., :5], part), name
    elsewhere = rollout.to("meta")
    assert elsewhere.record.sampling_masks is not None
    assert elsewhere.record.sampling_masks.token_ids.is_meta
    assert all(getattr(elsewhere, name).device.type == "meta" for name in parts.keys() - {"sampling_masks"})


def test_a_part_that_only_some_batches_have_is_not_lost_silently():
    for first, second in (({}, {"expert_ids": None}), ({"expert_ids": None}, {})):
        with pytest.raises(AssertionError, match="only some batches have"):
            Rollout.cat([make_rollout(**first), make_rollout(**second)])


def test_a_rollout_is_joined_and_its_rows_are_chosen_with_all_records():
    rollout = Rollout.cat([make_rollout(), make_rollout().rows(slice(1, 2))])
    assert rollout.record.sampling_masks is not None
    assert sets_of(rollout.record.sampling_masks) == [*SETS, SETS[1]]
    assert torch.equal(rollout.input_ids[3], rollout.input_ids[1])
    assert rollout.kv_bytes == 7
