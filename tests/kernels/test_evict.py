from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.evict import evict
from lit_rlkv.kernels.quantization import KV_DTYPES, dequantize, quantize, quantized
from lit_rlkv.types import NEVER, wide
from tests.kernels.evict_cases import (
    DEVICE,
    SINK,
    WINDOW,
    bits_equal,
    evict_pool,
    evicted,
    looped,
    make_pool,
    small_pool,
)
from tests.tiers import slow

IMPLEMENTATIONS = ["reference", "triton"]
NAN = float("nan")


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small blocks, and fill scratch memory with wrong values."""
    from lit_rlkv.kernels.evict import kernel

    monkeypatch.setattr(kernel, "CHOOSE_BLOCK", 32)
    monkeypatch.setattr(kernel, "MOVE_BLOCK", 16)
    monkeypatch.setattr(kernel, "LINE_BYTES", 32)
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))


def poisoned(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*args: object, **kwargs: object) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(NAN if tensor.is_floating_point() else 0)

    return filled


CASES = {
    "odd sizes": ({"n_slots": 17, "kv_heads": 1}, 9),
    "one key goes": ({"n_slots": 33, "dtype": torch.float16}, 32),
    "one key is chosen": ({"n_slots": 33, "column_dtype": torch.int32}, SINK + WINDOW + 1),
    "dims of no power of two": ({"n_slots": 63, "dim": 20, "dim_v": 12, "dtype": torch.bfloat16}, 40),
    "several blocks": ({"n_slots": 130, "batch": 2, "dtype": torch.float16}, 64),
    "no running score": ({"n_slots": 24, "kv_heads": 3, "has_attention": False}, 20),
}


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("case", [slow(c) if c.startswith("one key") else c for c in CASES])
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_the_pool_and_the_evictions_are_those_of_a_loop_over_keys_in_every_bit(kernels: str, case: str):
    shape, budget = CASES[case]
    pool = make_pool(**shape)
    expected = looped(pool, budget)
    assert not any(expected.same(pool)[name] for name in ("columns", "evicted_at"))
    same = evicted(pool, budget, kernels).same(expected)
    assert all(same.values()), same


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_keys_of_a_prompt_are_kept_beside_the_budget(kernels: str):
    # Prompts end at column 14, so rows of 9, 14 and 3 prompt keys keep as many more.
    pool, prompt_end = make_pool(48), 14
    slots = torch.arange(48)
    for row, first in enumerate(pool.first.tolist()):  # each row holds its prompt, as in a cache
        n_prompt = prompt_end - first
        pool.columns[row, :, :n_prompt] = first + slots[:n_prompt]
        pool.columns[row, :, n_prompt:] = (pool.now[row] - 48 + slots)[n_prompt:]
    after = evicted(pool, 12, kernels, prompt_end=prompt_end)
    same = after.same(looped(pool, 12, prompt_end=prompt_end))
    assert all(same.values()), same
    assert after.columns[0, 0, :9].tolist() == list(range(5, 14))
    n_evicted = (after.evicted_at == after.now[:, None, None]).sum(2)
    assert n_evicted[:, 0].tolist() == [48 - 12 - 9, 0, 48 - 12 - 3]
    assert not all(evicted(pool, 12, kernels).same(after).values())


@pytest.mark.parametrize(
    ("shape", "budget", "window"),
    [
        pytest.param({"n_slots": 70, "dtype": torch.bfloat16, "dim": 40, "batch": 2}, 50, 5),
        pytest.param(
            {"n_slots": 1152, "dtype": torch.bfloat16, "batch": 64, "kv_heads": 8, "dim": 128, "dim_v": 128},
            1024,
            16,
            marks=pytest.mark.gpu,
        ),
        pytest.param(
            {"n_slots": 5001, "dtype": torch.float32, "batch": 3, "kv_heads": 3, "dim": 80, "dim_v": 96},
            4096,
            33,
            marks=pytest.mark.gpu,
        ),
    ],
)
def test_the_kernel_moves_the_bits_that_the_definition_moves(shape: dict[str, int], budget: int, window: int):
    pool = make_pool(**shape)
    expected = evicted(pool, budget, "reference", window=window)
    same = evicted(pool, budget, "triton", window=window).same(expected)
    assert all(same.values()), same


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_evictions_are_recorded_in_16_bits_where_the_table_is(kernels: str):
    pool = replace(make_pool(70), now=make_pool(70).now + 40_000)  # beyond what a signed number holds
    expected = evicted(pool, 50, kernels)
    assert (expected.evicted_at > 2**15).sum() > (expected.evicted_at == NEVER).sum() > 0
    found = evicted(replace(pool, evicted_at=pool.evicted_at.to(torch.int16)), 50, kernels)
    assert found.evicted_at.dtype == torch.int16
    assert torch.equal(wide(found.evicted_at), expected.evicted_at)


@pytest.mark.gpu
def test_a_captured_graph_evicts_whichever_rows_are_due_when_it_runs():
    pool = make_pool(1152, torch.bfloat16, batch=8, kv_heads=8, dim=128, dim_v=128)
    evicted(pool, 1024, "triton")  # compiles
    captured = pool.on(DEVICE)
    graph = torch.cuda.CUDAGraph()
    captured.is_due.fill_(False)
    with torch.cuda.graph(graph):
        evict_pool(captured, 1024, "triton")
    graph.replay()
    assert captured.same(replace(pool, is_due=captured.is_due))["keys"]
    captured.is_due.copy_(pool.is_due)
    graph.replay()
    same = captured.same(evicted(pool, 1024, "reference"))
    assert all(same.values()), same


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_an_eviction_written_out_by_hand(kernels: str):
    # Columns 4..11, now = 12. Sink 1 protects column 4, window 2 columns 10 and 11. Of the others, columns 5
    # to 9 with scores 3, 1, 7, 3, 2, the two best are 7 at column 7 and the earlier 3 at column 5.
    pool = small_pool([0.0, 3.0, 1.0, 7.0, 3.0, 2.0, 0.0, 0.0])
    after = evicted(pool, 5, kernels, sink=1, window=2)
    assert after.columns[0, 0].tolist() == [4, 5, 7, 10, 11, 9, 10, 11]
    assert after.keys[0, 0, :, 0].tolist() == [0, 1, 3, 6, 7, 5, 6, 7]
    assert after.values[0, 0, :, 0].tolist() == [0, -1, -3, -6, -7, -5, -6, -7]
    died = dict.fromkeys((6, 8, 9), 12)
    assert after.evicted_at[0, 0].tolist() == [died.get(column, NEVER) for column in range(15)]


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_equal_scores_keep_the_earlier_key_and_the_two_zeros_are_equal(kernels: str):
    after = evicted(small_pool([-0.0, 0.0, -0.0, 0.0, -0.0, 0.0]), 4, kernels, sink=0, window=1)
    assert after.columns[0, 0, :4].tolist() == [4, 5, 6, 9]


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_scores_order_as_numbers_do_from_minus_infinity_to_what_is_not_a_number(kernels: str):
    tiny = 1e-45  # the smallest of all, which devices that round it to zero would tie with its neighbours
    ascending = [-torch.inf, -3e38, -1.0, -tiny, 0.0, tiny, 1.0, 3e38, torch.inf, NAN]
    shuffled = torch.randperm(len(ascending), generator=torch.Generator().manual_seed(1)).tolist()
    pool = small_pool([ascending[rank] for rank in shuffled])
    for budget in range(1, len(ascending)):
        after = evicted(pool, budget, kernels, sink=0, window=0)
        kept = [shuffled[column - 4] for column in after.columns[0, 0, :budget].tolist()]
        assert sorted(kept) == list(range(len(ascending) - budget, len(ascending)))


@pytest.mark.parametrize("dtype", [slow(torch.float16), torch.bfloat16])
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_scores_may_be_of_16_bits(kernels: str, dtype: torch.dtype):
    pool = make_pool(33)
    pool = replace(pool, scores=pool.scores.to(dtype))
    same = evicted(pool, 20, kernels).same(looped(pool, 20))
    assert all(same.values()), same


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_scores_that_only_64_bits_tell_apart_are_ties(kernels: str):
    pool = make_pool(33)
    fine = replace(pool, scores=pool.scores.double() * (1 - 1e-12 * torch.arange(33).double()))
    assert not looped(fine, 20).same(looped(pool, 20))["evicted_at"]
    assert bits_equal(evicted(fine, 20, kernels).evicted_at, looped(pool, 20).evicted_at)


@pytest.mark.parametrize("score", [slow(NAN), -NAN, slow(torch.inf), -torch.inf, slow(2.0)])
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_equal_scores_keep_exactly_budget_keys(kernels: str, score: float):
    pool = small_pool([score] * 9)
    after = evicted(pool, 6, kernels, sink=0, window=0)
    assert after.columns[0, 0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert (after.evicted_at[0, 0] == 13).nonzero().flatten().tolist() == [10, 11, 12]


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_padding_is_not_kept_and_gets_no_evicted_at(kernels: str):
    # The first three of nine columns are padding of high score.
    pool = small_pool([9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    pool = replace(pool, first=pool.first + 3)
    pool.evicted_at[..., :7] = 0
    after = evicted(pool, 4, kernels, sink=1, window=2)
    assert after.columns[0, 0, :4].tolist() == [7, 10, 11, 12]
    died = dict.fromkeys((8, 9), 13)
    assert after.evicted_at[0, 0].tolist() == [0 if c < 7 else died.get(c, NEVER) for c in range(16)]


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_slots_without_a_key_are_not_kept_and_nothing_is_recorded_for_them(kernels: str):
    # Columns 0..6, of which five slots of nine hold keys; the rest is old content of the highest score.
    pool = small_pool([1.0, 5.0, 2.0, 4.0, 3.0, 9.0, NAN, torch.inf, 9.0])
    columns = torch.tensor([0, 1, 3, 5, 6, -1, -1, -1, -1])[None, None]
    pool = replace(pool, columns=columns, now=torch.tensor([7]), first=torch.tensor([0]))
    after = evicted(pool, 3, kernels, sink=0, window=1)
    assert after.columns[0, 0, :3].tolist() == [1, 5, 6]
    assert after.keys[0, 0, :3, 0].tolist() == [1, 3, 4]
    assert after.evicted_at[0, 0].tolist() == [{0: 7, 3: 7}.get(c, NEVER) for c in range(16)]
    as_keys = replace(pool, columns=torch.arange(9)[None, None])
    assert not bits_equal(evicted(as_keys, 3, kernels, sink=0, window=1).evicted_at, after.evicted_at)


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_rows_that_are_not_due_do_not_change(kernels: str):
    pool = make_pool(33)
    pool.scores[1] = NAN
    pool.keys[1, 0, 3] = NAN
    after = evicted(pool, 20, kernels)
    for name in ("keys", "values", "columns", "attention", "evicted_at"):
        assert bits_equal(getattr(after, name)[1], getattr(pool, name)[1])
        assert not bits_equal(getattr(after, name)[2], getattr(pool, name)[2])
    none_due = replace(pool, is_due=torch.zeros(3, dtype=torch.bool))
    assert all(evicted(none_due, 20, kernels).same(none_due).values())


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_the_running_score_may_be_the_score_itself(kernels: str):
    pool = make_pool(70, batch=2)
    pool = replace(pool, attention=pool.scores)
    expected = looped(pool, 40)
    shared = pool.on(DEVICE)
    shared = replace(shared, attention=shared.scores)
    evict_pool(shared, 40, kernels)
    same = shared.same(expected)
    assert same.pop("scores") is False  # it is the running score, which moved
    assert all(same.values()), same


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_parts_of_larger_tensors_are_evicted_in_place_and_their_surroundings_stay(kernels: str):
    pool = make_pool(33, torch.float16).on(DEVICE)
    kv_heads, seq = pool.evicted_at.shape[1:]
    # Evictions of all layers in one table; keys and values interleaved, one number off every alignment; one
    # score for all heads.
    table = torch.full((3, 4, kv_heads, seq), -5, dtype=torch.int32, device=DEVICE)
    both = torch.full((3, 33, kv_heads, 1 + 16 + 8), -5.0, dtype=torch.float16, device=DEVICE)
    parts = replace(
        pool,
        scores=pool.scores[:, :1].expand(-1, kv_heads, -1),
        evicted_at=table[:, 2],
        keys=both[..., 1:17].transpose(1, 2),
        values=both[..., 17:].transpose(1, 2),
    )
    parts.evicted_at.copy_(pool.evicted_at)
    parts.keys.copy_(pool.keys)
    parts.values.copy_(pool.values)
    expected = looped(parts, 20)
    evict_pool(parts, 20, kernels)
    same = parts.same(expected)
    assert all(same.values()), same
    assert (both[..., 0] == -5).all()
    assert (table[:, [0, 1, 3]] == -5).all()


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_the_comparison_catches_a_window_or_a_sink_off_by_one(kernels: str):
    pool = make_pool(33)
    # The lowest scores where protection begins and ends, so that it decides.
    pool.scores[:, :, :SINK] = -9.0
    pool.scores[:, :, -WINDOW - 2 :] = -9.0
    pool.columns[:, :, -WINDOW - 2 :] = pool.columns[:, :, -1:] - torch.arange(WINDOW + 1, -1, -1)
    pool.columns[:, :, : SINK + 1] = pool.first[:, None, None] + torch.arange(SINK + 1)
    pool.columns[:, :, SINK + 1 : -WINDOW - 2] = pool.first[:, None, None] + SINK + 2 + torch.arange(25)
    expected = looped(pool, 20)
    assert all(evicted(pool, 20, kernels).same(expected).values())
    for wrong in ({"window": WINDOW + 1}, {"window": WINDOW - 1}, {"sink": SINK - 1}):
        assert not evicted(pool, 20, kernels, **wrong).same(expected)["evicted_at"]


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
def test_the_comparison_catches_late_ties_swapped_heads_and_times_off_by_one(kernels: str):
    pool = make_pool(33)
    expected = looped(pool, 20)
    slot = torch.arange(33)
    wrong = {
        "later": replace(pool, scores=pool.scores + slot * 1e-4),
        "heads": replace(pool, scores=pool.scores.flip(1)),
        "now": replace(pool, now=pool.now + 1),
        "first": replace(pool, first=pool.first - 1),
    }
    for change, tampered in wrong.items():
        assert not evicted(tampered, 20, kernels).same(expected)["evicted_at"], change


@pytest.mark.usefixtures("_as_users_run_it")
def test_tensors_that_cannot_be_compacted_in_place_are_refused():
    pool = make_pool(17)
    with pytest.raises(ValueError, match=r"budget=18 exceeds the pool's 17 slots"):
        evicted(pool, 18, "reference")
    apart = pool.on(DEVICE)
    apart = replace(apart, keys=apart.keys.repeat_interleave(2, dim=-1)[..., ::2])
    with pytest.raises(ValueError, match=r"the last dimension of keys .* must be contiguous, got stride 2"):
        evict_pool(apart, 9, "triton")


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_codes_and_scales_move_together(kernels: str, kv_dtype: str):
    pool = make_pool(33)
    plain = evicted(pool, 20, "reference")
    (keys, key_scales), (values, value_scales) = (
        quantize(each, kv_dtype) for each in (pool.keys, pool.values)
    )
    coded = replace(pool, keys=keys, values=values).on(DEVICE)
    scales = [each.to(DEVICE) for each in (key_scales, value_scales)]
    before = [each.clone() for each in scales]
    tensors = [getattr(coded, f.name) for f in fields(coded)]
    evict(*tensors, budget=20, sink=SINK, window=WINDOW, scales=scales, kernels=kernels)
    assert torch.equal(coded.columns, plain.columns)
    front = (coded.is_due.nonzero().flatten(), slice(None), slice(20))
    for codes, scale, moved in zip(
        (coded.keys, coded.values), scales, (plain.keys, plain.values), strict=True
    ):
        expected = quantized(moved, kv_dtype)
        assert torch.equal(dequantize(codes, scale, kv_dtype, torch.float32)[front], expected[front])
    assert not torch.equal(scales[0], before[0])
    waits = ~coded.is_due
    assert all(torch.equal(after[waits], each[waits]) for after, each in zip(scales, before, strict=True))
