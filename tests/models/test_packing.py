"""Rows cut into passes, moved to column 0 and put back."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lit_rlkv.models.packing import cut_into_passes, packed, unpacked
from lit_rlkv.types import NEVER, Record, Rollout
from tests.hand_built import tokens_of

T, F = True, False
LENGTHS = torch.tensor([3, 9, 4, 4, 20, 1, 9, 2])


def cuts(lengths: Tensor, limit: int, **options) -> list[list[int]]:
    return [rows.tolist() for rows in cut_into_passes(lengths, limit, **options)]


def ragged_lengths(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 60, (int(torch.randint(1, 40, (), generator=generator)),), generator=generator)


def test_cuts_match_hand_arithmetic():
    # longest first: 20 | 9 9 (2 · 9 ≤ 20) | 4 4 3 2 1 (5 · 4 ≤ 20); in each pass the rows keep their order
    assert cuts(LENGTHS, 20) == [[4], [1, 6], [0, 2, 3, 5, 7]]
    # a token less: 9 9 needs 18, and 5 · 4 = 20 are one row too many
    assert cuts(LENGTHS, 19) == [[4], [1, 6], [0, 2, 3, 7], [5]]


@pytest.mark.parametrize("rows_per_unit", [1, 2])
@pytest.mark.parametrize("limit", [1, 50, 120, 10_000])
def test_no_pass_exceeds_the_limit_and_none_could_take_the_next_row(limit, rows_per_unit):
    for seed in range(20):
        lengths = ragged_lengths(seed)
        found = cut_into_passes(lengths, limit, rows_per_unit=rows_per_unit)
        assert sorted(torch.cat(found).tolist()) == list(range(len(lengths)))
        for number, units in enumerate(found):
            longest = int(lengths[units].max())
            assert len(units) * rows_per_unit * longest <= limit or len(units) == 1
            if number < len(found) - 1:
                assert (len(units) + 1) * rows_per_unit * longest > limit


def test_a_unit_longer_than_the_limit_is_alone():
    assert cuts(torch.tensor([5, 100, 5]), 10) == [[1], [0, 2]]
    assert cuts(torch.tensor([100, 101]), 10) == [[1], [0]]
    assert cuts(torch.tensor([7, 7]), 10, rows_per_unit=2) == [[0], [1]]


def test_pairs_count_both_of_their_rows():
    # two pairs of 5 tokens a side are 20 tokens, two rows of 5 are 10
    assert cuts(torch.tensor([5, 5, 5, 5]), 20, rows_per_unit=2) == [[0, 1], [2, 3]]
    assert cuts(torch.tensor([5, 5, 5, 5]), 20) == [[0, 1, 2, 3]]


def test_rows_of_similar_length_are_together():
    for seed in range(20):
        lengths = ragged_lengths(seed)
        found = cut_into_passes(lengths, 150)
        for one, following in pairwise(found):
            assert int(lengths[one].min()) >= int(lengths[following].max())
    # so there is less padding than if they were cut in their order, three at a time
    in_order = sum(len(part) * int(part.max()) for part in LENGTHS.split(3))
    assert sum(len(rows) * int(LENGTHS[rows].max()) for rows in cut_into_passes(LENGTHS, 27)) < in_order


@pytest.mark.parametrize("n_passes", [2, 3, 7, 8])
def test_more_passes_are_made_if_another_rank_has_more(n_passes):
    for limit in (20, 10_000):
        least = len(cuts(LENGTHS, limit))
        found = cut_into_passes(LENGTHS, limit, n_passes=n_passes)
        assert len(found) == max(n_passes, least)
        assert sorted(torch.cat(found).tolist()) == list(range(8))
        assert all(len(rows) * int(LENGTHS[rows].max()) <= limit or len(rows) == 1 for rows in found)
        lengths = [int(LENGTHS[rows].max()) for rows in found]
        assert lengths == sorted(lengths, reverse=True)
    assert len(cuts(LENGTHS, 10_000, n_passes=99)) == 8  # never an empty one


def test_cuts_are_the_same_each_time_and_equal_lengths_keep_their_order():
    assert cuts(LENGTHS, 20) == cuts(LENGTHS.clone(), 20)
    assert cuts(torch.full((7,), 5), 15) == [[0, 1, 2], [3, 4, 5], [6]]


def ragged_rollout(seed: int, n_rows: int = 6, max_prompt: int = 7, max_response: int = 9) -> Rollout:
    """Random prompts, responses and evictions; keys are evicted while they are in the past of a response.

    The sampler's log-probs are the numbers of the columns, which tell where a value comes from.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    n_columns = max_prompt + max_response
    columns = torch.arange(n_columns)
    n_prompt, n_response = draw(1, max_prompt, n_rows, 1), draw(1, max_response, n_rows, 1)
    response_mask = (columns >= max_prompt) & (columns < max_prompt + n_response)
    attention_mask = ((columns >= max_prompt - n_prompt) & (columns < max_prompt)) | response_mask
    shape = (n_rows, 2, 2, n_columns)
    evicted_at = (columns.clamp(min=max_prompt) + draw(1, 4, *shape)).int()
    evicted_at = torch.where(draw(0, 1, *shape) == 1, evicted_at, NEVER)
    # a first token that stays keeps every query from being without any key
    evicted_at = torch.where(columns == max_prompt - n_prompt[:, None, None], NEVER, evicted_at)
    return Rollout(
        input_ids=torch.where(attention_mask, draw(2, 50, n_rows, n_columns), 0),
        attention_mask=attention_mask,
        response_mask=response_mask,
        rollout_logps=columns.float() * response_mask,
        record=Record(torch.where(attention_mask[:, None, None], evicted_at, 0)),
        kv_bytes=1,
    )


def test_packed_rows_match_a_table_written_by_hand():
    never = NEVER
    rollout = Rollout(
        input_ids=torch.tensor([[0, 0, 5, 6, 7, 0], [2, 3, 4, 8, 9, 10]]),
        attention_mask=torch.tensor([[F, F, T, T, T, F], [T, T, T, T, T, T]]),
        response_mask=torch.tensor([[F, F, F, T, T, F], [F, F, F, T, T, T]]),
        rollout_logps=torch.tensor([[0, 0, 0, -1.0, -2.0, 0], [0, 0, 0, -3.0, -4.0, -5.0]]),
        record=Record(
            torch.tensor([[[[0, 0, 4, never, 5, 0]]], [[[4, never, 5, 5, never, never]]]], dtype=torch.int32)
        ),
        kv_bytes=7,
    )
    first = packed(rollout, rollout.attention_mask, torch.tensor([0]))
    assert first.input_ids.tolist() == [[5, 6, 7]]
    assert first.response_mask.tolist() == [[F, T, T]]
    assert first.rollout_logps.tolist() == [[0, -1.0, -2.0]]
    assert first.evicted_at.tolist() == [[[[2, never, 3]]]]  # two columns earlier, as the queries are
    assert first.kv_bytes == 7
    both = packed(rollout, rollout.attention_mask, torch.tensor([1, 0]))
    assert both.input_ids.tolist() == [[2, 3, 4, 8, 9, 10], [5, 6, 7, 0, 0, 0]]
    assert both.attention_mask.tolist() == [[T] * 6, [T, T, T, F, F, F]]
    assert both.evicted_at.tolist() == [[[[4, never, 5, 5, never, never]]], [[[2, never, 3, 0, 0, 0]]]]
    assert unpacked(first.rollout_logps, rollout.attention_mask, torch.tensor([0])).tolist() == [
        [0, 0, 0, -1.0, -2.0, 0]
    ]


@pytest.mark.parametrize("seed", range(6))
def test_unpacking_undoes_packing_on_the_response(seed: int):
    rollout = ragged_rollout(seed)
    for rows in (torch.tensor([4, 0, 2]), torch.tensor([3]), slice(1, 5)):
        part = packed(rollout, rollout.attention_mask, rows)
        assert tokens_of(part) == tokens_of(rollout.rows(rows))
        assert part.attention_mask[:, 0].all()
        assert part.attention_mask.any(dim=0).all()  # no column of padding alone
        back = unpacked(part.rollout_logps, rollout.attention_mask, rows)
        assert torch.equal(back, rollout.rollout_logps[rows])
        shifted = unpacked(part.rollout_logps.roll(1, dims=1), rollout.attention_mask, rows)
        assert not torch.equal(shifted, rollout.rollout_logps[rows])
