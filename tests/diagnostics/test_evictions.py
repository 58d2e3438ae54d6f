import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_rlkv.diagnostics.evictions import (
    affected_shares,
    cached_keys,
    lifetimes,
    mean_age,
    median_age,
    response_queries,
    retained_fraction,
)
from lit_rlkv.types import NEVER, Rollout
from tests.hand_built import make_datamodule, make_roles, one_row

N = NEVER


# A column of padding, tokens in columns 1 to 5, of which 3, 4 and 5 are actions. Queries: columns 2, 3, 4.
# Head 0 loses the key of column 2 to the query of column 4; head 1 that of 1 to 3, and that of 2 to 4.
TWO_HEADS = one_row([[[0, N, 4, N, N, N], [0, 3, 4, N, N, N]]], n_pad=1, n_prompt=2)


def test_a_query_stands_one_column_before_the_token_it_predicts():
    assert response_queries(TWO_HEADS.response_mask).tolist() == [[False, False, True, True, True, False]]


def test_a_lifetime_counts_the_queries_that_saw_the_key():
    evicted, n_kept = lifetimes(TWO_HEADS)
    # Head 0: column 2 lives 4 - 2 = 2. Head 1: column 1 lives 3 - 1 = 2, column 2 lives 2.
    assert evicted[0].tolist() == [[0, 0, 1, 0, 0, 0, 0], [0, 0, 2, 0, 0, 0, 0]]
    # Keys are columns 1 to 4: the token of column 5 was written and never read.
    assert n_kept.tolist() == [[3, 2]]


def test_a_token_is_affected_once_its_query_misses_a_key_in_any_head():
    # Queries of columns 3 and 4 miss keys in some head, that of column 2 misses none.
    assert affected_shares(TWO_HEADS) == pytest.approx({"kv/affected": 2 / 3, "kv/affected_rows": 1.0})
    one_head = TWO_HEADS.with_record(evicted_at=TWO_HEADS.evicted_at[:, :, :1])
    assert affected_shares(one_head)["kv/affected"] == pytest.approx(1 / 3)
    # What is no token never was a key; an eviction after the last query affects nobody.
    late = one_row([[[0, 5, N, N, N, N]], [[N] * 6]], n_pad=1, n_prompt=2)
    assert affected_shares(late) == {"kv/affected": 0.0, "kv/affected_rows": 0.0}


def test_an_eviction_one_query_later_changes_the_lifetime():
    late = one_row([[[0, N, 5, N, N, N], [0, 3, 4, N, N, N]]], n_pad=1, n_prompt=2)
    assert lifetimes(late)[0][0, 0].tolist() == [0, 0, 0, 1, 0, 0, 0]


def test_mean_and_median_are_of_the_ages_counted():
    counts = torch.tensor([[0, 2, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]])  # ages 1, 1, 3; 1, 2; none
    assert mean_age(counts)[:2].tolist() == [pytest.approx(5 / 3), 1.5]
    assert median_age(counts)[:2].tolist() == [1, 1]
    assert math.isnan(mean_age(counts)[2])
    assert math.isnan(median_age(counts)[2])


def test_retained_is_cached_keys_over_keys_so_far():
    every, last = retained_fraction(TWO_HEADS)
    # Keys so far at columns 2, 3, 4: 2, 3, 4. Head 0 holds 2, 3, 3 and head 1 holds 2, 2, 2.
    assert every[0].tolist() == pytest.approx([(1 + 1 + 3 / 4) / 3, (1 + 2 / 3 + 2 / 4) / 3])
    assert last[0].tolist() == pytest.approx([3 / 4, 2 / 4])


def test_the_last_query_of_several_turns_is_that_of_the_last():
    turns = torch.tensor([[False, False, False, True, False, True]])
    every, last = retained_fraction(replace(TWO_HEADS, response_mask=turns))
    # Queries at columns 2 and 4, the last at 4.
    assert every[0].tolist() == pytest.approx([(1 + 3 / 4) / 2, (1 + 2 / 4) / 2])
    assert last[0].tolist() == pytest.approx([3 / 4, 2 / 4])


def sampled() -> Rollout:
    return make_datamodule(make_roles(), rollout={"max_new_tokens": 16}).collect().rollout


def by_definition(rollout: Rollout) -> Tensor:
    """[row, layer, head, q, k] is True where query q still saw key k."""
    column = torch.arange(rollout.input_ids.shape[1])
    is_born = rollout.attention_mask[:, None] & (column <= column[:, None])
    return is_born[:, None, None] & (column[:, None] < rollout.evicted_at[..., None, :])


def test_counts_of_a_rollout_agree_with_their_definitions():
    rollout = sampled()
    is_seen, is_query = by_definition(rollout), response_queries(rollout.response_mask)
    live = torch.stack([cached_keys(rollout, layer) for layer in range(2)], dim=1)
    assert torch.equal(live, is_seen.sum(-1))
    fraction = is_seen.sum(-1) / rollout.attention_mask.cumsum(1)[:, None, None].clamp(min=1)
    expected = fraction.permute(1, 2, 0, 3)[:, :, is_query].mean(-1)
    every, last = retained_fraction(rollout)
    torch.testing.assert_close(every, expected)
    assert 0 < last.mean() < every.mean() < 1
    late = rollout.with_record(evicted_at=torch.where(rollout.evicted_at < N, rollout.evicted_at + 1, N))
    assert (retained_fraction(late)[0] - expected).abs().min() > 1e-3


def test_lifetimes_of_a_rollout_agree_with_who_saw_whom():
    rollout = sampled()
    evicted, n_kept = lifetimes(rollout)
    is_key = rollout.attention_mask & response_queries(rollout.attention_mask)
    # A key that was evicted had been seen by as many queries as it was old.
    age = by_definition(rollout).sum(dim=3)
    for layer in range(2):
        for head in range(2):
            is_evicted = is_key & (rollout.evicted_at[:, layer, head] != N)
            expected = torch.bincount(age[:, layer, head][is_evicted], minlength=evicted.shape[-1])
            assert torch.equal(evicted[layer, head], expected)
            assert int(n_kept[layer, head]) == int((is_key & ~is_evicted).sum())
    assert int(evicted.sum()) > 100
