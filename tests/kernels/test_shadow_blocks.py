"""Plain attention in blocks of queries, against the definition."""

import pytest
import torch

from lit_rlkv.kernels.shadow_attention import blocks, reference
from lit_rlkv.types import NEVER
from tests.kernels.accuracy import bound
from tests.kernels.shadow_cases import (
    Case,
    cache_evictions,
    excess_errors,
    make_case,
    random_evictions,
    with_gradients,
)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch):
    """All sequences of more than 16 tokens are long."""
    for name, value in {"BLOCK": 8, "SHORT": 16, "LONG": 17}.items():
        monkeypatch.setattr(blocks, name, value)


def without_lse(query, key, value, evicted_at, scaling, **settings):
    """`shadow_attention`, and a log-sum-exp without a gradient in its errors."""
    out = blocks.shadow_attention(query, key, value, evicted_at, scaling, **settings)
    lse = reference.shadow_attention_with_lse(query, key, value, evicted_at, scaling, **settings)[1]
    return out, lse


def windows(seq: int) -> torch.Tensor:
    """A window of 9 keys in one head, chunks of 8 in the other, and row 1 padded at both ends."""
    column = torch.arange(seq)
    evicted_at = torch.stack([column + 9, (column // 8 + 1) * 8]).expand(2, -1, -1).clone().int()
    evicted_at[1, :, :3] = evicted_at[1, :, -4:] = 0
    return evicted_at


TABLES = {
    "random": random_evictions(61),
    "cache": cache_evictions(61),
    "windows": windows(61),
    "one for all heads": random_evictions(61, n_kv_heads=1),
}


@pytest.mark.parametrize("attend", [without_lse, blocks.shadow_attention_with_lse])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("group", "softcap"), [(1, None), (3, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_as_accurate_as_the_definition(attend, table, group, softcap, dtype):
    case = make_case(61, group, TABLES[table], softcap=softcap)
    assert max(excess_errors(attend, case, dtype).values()) <= bound(dtype)


def dense(*ranges: tuple[int, int], seq: int = 61) -> torch.Tensor:
    """Keys of each row in [begin, end), none of which a query before the end misses."""
    column, (begin, end) = torch.arange(seq), torch.tensor(ranges).T[:, :, None, None]
    return torch.where((begin <= column) & (column < end), end, 0).int()


@pytest.mark.parametrize("ranges", [[(0, 61), (0, 61)], [(0, 40), (7, 61)], [(5, 60), (5, 60)]])
def test_rows_without_evictions_are_causal(ranges):
    case = make_case(61, 2, dense(*ranges))
    assert blocks._causal_ranges(case.evicted_at) == ranges
    assert max(excess_errors(without_lse, case, torch.float32).values()) <= bound(torch.float32)


@pytest.mark.parametrize(
    ("row", "column", "value"), [(0, 20, 0), (0, 20, 39), (0, 20, NEVER), (1, slice(None), 0)]
)
def test_rows_that_are_not_causal_take_blocks(row, column, value):
    evicted_at = dense((0, 40), (7, 61))
    evicted_at[row, :, column] = value
    assert blocks._causal_ranges(evicted_at) is None
    assert max(excess_errors(without_lse, make_case(61, 2, evicted_at), torch.float32).values()) <= 8


@pytest.mark.parametrize("attend", [without_lse, blocks.shadow_attention_with_lse])
@pytest.mark.parametrize("wrong", ["off by one", "a key missing from a list"])
def test_the_comparison_catches_wrong_keys(attend, wrong, monkeypatch):
    def mistaken(query, key, value, evicted_at, *args, **settings):
        if wrong == "off by one":
            evicted_at = evicted_at + (evicted_at > 0)
        return attend(query, key, value, evicted_at, *args, **settings)

    if wrong != "off by one":
        cached_in = blocks.CachedBlocks.cached_in
        monkeypatch.setattr(blocks.CachedBlocks, "cached_in", lambda *args: cached_in(*args).roll(1, 1))
    case = make_case(61, 2, TABLES["cache"])
    errors = excess_errors(mistaken, case, torch.float32)
    assert min(errors[name] for name in ("out", "d_query", "d_key", "d_value")) > 1000


def test_lists_hold_the_keys_of_a_block_alone_and_short_or_full_sequences_have_none(monkeypatch):
    # The window of 9 and a block.
    assert blocks._n_keys_of_blocks(TABLES["windows"]) == [8, 16, 16, 16, 16, 16, 16, 13]
    monkeypatch.setattr(blocks, "LONG", 62)
    assert blocks._n_keys_of_blocks(TABLES["windows"]) is not None
    assert blocks._n_keys_of_blocks(dense((0, 61), (0, 61))) is None  # all keys: nothing to save
    assert blocks._n_keys_of_blocks(TABLES["windows"][..., :16]) is None


def test_a_batch_without_rows_is_none():
    empty = torch.empty(0, 2, 61, 4)
    assert blocks.shadow_attention(empty, empty, empty, torch.empty(0, 1, 61).int(), 0.5).shape == empty.shape


def saved_numbers(attend, case: Case) -> int:
    """Numbers that autograd holds between forward and backward pass."""
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with_gradients(attend, case)
    return sum(held.values())


def test_no_square_is_held_for_the_backward_pass():
    case = make_case(600, 2, windows(600)).to(torch.float32)
    n_tokens = 2 * 600
    assert saved_numbers(blocks.shadow_attention_with_lse, case) < 400 * n_tokens
    assert saved_numbers(reference.shadow_attention_with_lse, case) > 4 * 600 * n_tokens
