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


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("group", "softcap"), [(1, None), (3, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_as_accurate_as_the_definition(table, group, softcap, dtype):
    case = make_case(61, group, TABLES[table], softcap=softcap)
    assert max(excess_errors(without_lse, case, dtype).values()) <= bound(dtype)


def with_sink(attend, case: Case, n_value_dims: int | None = None) -> list[torch.Tensor]:
    """Output and gradients of an attention with a sink of each head."""
    generator = torch.Generator().manual_seed(3)
    sink = torch.randn(case.query.shape[1], generator=generator, dtype=case.query.dtype)
    given = (case.query, case.key, case.value[..., :n_value_dims], sink)
    leaves = [each.detach().clone().requires_grad_() for each in given]
    out = attend(*leaves[:3], case.evicted_at, case.scaling, softcap=case.softcap, sink=leaves[3])
    upstream = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    ("group", "softcap", "n_value_dims"), [(1, None, 3), (3, None, None), (2, 2.0, None)]
)
def test_sinks_of_blocks_and_their_gradients_are_those_of_the_definition(table, group, softcap, n_value_dims):
    case = make_case(61, group, TABLES[table], softcap=softcap).to(torch.float64)
    expected = with_sink(reference.shadow_attention, case, n_value_dims)
    for found, right in zip(with_sink(blocks.shadow_attention, case, n_value_dims), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


def test_gradients_without_the_share_of_the_sink_are_found(monkeypatch: pytest.MonkeyPatch):
    case = make_case(61, 2, TABLES["cache"]).to(torch.float64)
    expected = with_sink(reference.shadow_attention, case)
    backward = blocks._Library.backward

    def of_the_block_alone(self, block, d_out, out, lse):
        own, own_lse = self.forward(block)
        return backward(self, block, d_out, own, own_lse.masked_fill(own_lse == -torch.inf, 0.0))

    monkeypatch.setattr(blocks._Library, "backward", of_the_block_alone)
    found = with_sink(blocks.shadow_attention, case)
    errors = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    assert errors[0] < 1e-10
    assert min(errors[1:4]) > 1e-3


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


@pytest.mark.parametrize("wrong", ["off by one", "a key missing from a list"])
def test_the_comparison_catches_wrong_keys(wrong, monkeypatch):
    def mistaken(query, key, value, evicted_at, *args, **settings):
        if wrong == "off by one":
            evicted_at = evicted_at + (evicted_at > 0)
        return without_lse(query, key, value, evicted_at, *args, **settings)

    if wrong != "off by one":
        n_keys = blocks._n_keys_of_blocks
        monkeypatch.setattr(blocks, "_n_keys_of_blocks", lambda table: [n - 1 for n in n_keys(table)])
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

    def alone(*args, **settings):
        out = blocks.shadow_attention(*args, **settings)
        return out, out.sum(-1)

    assert saved_numbers(alone, case) < 400 * n_tokens
    assert saved_numbers(reference.shadow_attention_with_lse, case) > 4 * 600 * n_tokens
