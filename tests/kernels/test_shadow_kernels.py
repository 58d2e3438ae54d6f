import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.shadow_attention import SlotPlan, launch, reference, shadow_attention_with_lse
from lit_rlkv.types import NEVER
from tests.kernels.accuracy import GROUPS, LENGTHS, bound
from tests.kernels.shadow_cases import (
    Case,
    cache_evictions,
    excess_errors,
    layer_plan,
    make_case,
    random_evictions,
    with_gradients,
)
from tests.tiers import diagonal, slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ODD = (33, 2)
SHORT = (17, 2)


def triton(
    query: Tensor, key: Tensor, value: Tensor, evicted_at: Tensor, scaling: float, **settings: object
) -> tuple[Tensor, Tensor]:
    return shadow_attention_with_lse(query, key, value, evicted_at, scaling, kernels="triton", **settings)


def errors(
    case: Case, dtype: torch.dtype, block: int | None = None, plan: SlotPlan | None = None
) -> list[float]:
    """Return the errors of output, log-sum-exp and gradients, with a plan if `block` is given."""
    case = case.to(DEVICE)
    plan = layer_plan(case.evicted_at, block) if block else plan
    return list(excess_errors(triton, case, dtype, plan=plan).values())


@pytest.fixture
def _outputs_start_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def poisoned(*args: object, **settings: object) -> Tensor:
        tensor = real(*args, **settings)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 2**30)

    monkeypatch.setattr("lit_rlkv.kernels.shadow_attention.launch.torch.empty", poisoned)


# Every length and every group, with random evictions and those of a real schedule; not a full cross.
SHAPES = {
    "one position": (1, 1, None),
    "one position, listed": (1, 2, 16),
    "17, listed": (17, 4, 16),
    "33": (33, 7, None),
    "33, listed": (33, 2, 32),
    "63, listed": (63, 1, 16),
    "130": (130, 1, None),
}
SHORT_TIER = {
    ("one position", torch.float16),
    ("17, listed", torch.float32),
    ("33, listed", torch.float16),
    ("130", torch.float32),
}
"""Every branch once, in the short tier."""


@pytest.mark.usefixtures("_outputs_start_as_nan")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (shape, dtype) if (name, dtype) in SHORT_TIER else slow(shape, dtype)
        for name, shape in SHAPES.items()
        for dtype in (torch.float32, torch.float16)
    ],
)
def test_kernels_are_as_accurate_as_plain_torch(shape: tuple[int, int, int | None], dtype: torch.dtype):
    seq, group, block = shape
    assert seq in LENGTHS
    assert group in GROUPS
    assert max(errors(make_case(seq, group, random_evictions(seq)), dtype, block)) <= bound(dtype)


@pytest.mark.usefixtures("_outputs_start_as_nan")
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float16)])
def test_keys_that_share_a_slot_over_time_get_their_own_gradients(dtype: torch.dtype):
    evicted_at = cache_evictions(130)
    plan = layer_plan(evicted_at, 16)
    n_living = (evicted_at > torch.arange(130)).sum(-1)
    assert (n_living > 2 * plan.n_slots).any()  # slots have more than two owners on average
    assert max(errors(make_case(130, 2, evicted_at), dtype, 16)) <= bound(dtype)


CHANGES = {
    "one table for all KV heads": ({}, random_evictions(33, n_kv_heads=1)),
    "heads of 80 dimensions with values of 24": ({"dim": 80, "dim_v": 24}, random_evictions(33)),
    "heads of 96 dimensions": ({"dim": 96, "dim_v": 96}, random_evictions(33)),
    "values wider than keys": ({"dim": 8, "dim_v": 40}, random_evictions(33)),
    "soft-capped logits": ({"softcap": 3.0}, random_evictions(33)),
    "a schedule with padding on both sides": ({}, cache_evictions(33).masked_fill(torch.arange(33) > 28, 0)),
    "nothing dies": ({}, torch.full((1, 2, 33), NEVER, dtype=torch.int32)),
    "64-bit evictions beyond 32 bits": (
        {},
        torch.where(random_evictions(33) == NEVER, 2**40, random_evictions(33).long()),
    ),
}


@pytest.mark.usefixtures("_outputs_start_as_nan")
@pytest.mark.parametrize(("change", "block"), diagonal(CHANGES, [None, 16]))
def test_kernels_are_accurate_for_all_shapes_and_eviction_tables(change: str, block: int | None):
    shape, evicted_at = CHANGES[change]
    assert max(errors(make_case(33, 2, evicted_at, **shape), torch.float32, block)) <= bound(torch.float32)


@pytest.mark.usefixtures("_outputs_start_as_nan")
@pytest.mark.parametrize("block", [None, 16], ids=["contiguous", "listed"])
def test_queries_that_see_nothing_give_zeros_and_no_gradient(block: int | None):
    evicted_at = random_evictions(33)
    evicted_at[0, 0] = 0
    case = make_case(33, 2, evicted_at).to(torch.float32).to(DEVICE)
    plan = layer_plan(case.evicted_at, block) if block else None
    out, lse = triton(case.query, case.key, case.value, case.evicted_at, case.scaling, plan=plan)
    assert (out[0, :2] == 0).all()
    assert (lse[0, :2] == -torch.inf).all()
    gradients = with_gradients(triton, case, plan=plan)[2:]
    assert all(gradient.isfinite().all() for gradient in gradients)
    d_query, d_key, d_value = gradients
    assert (d_query[0, :2] == 0).all()
    assert (d_key[0, 0] == 0).all()
    assert (d_value[0, 0] == 0).all()


@pytest.mark.usefixtures("_outputs_start_as_nan")
@pytest.mark.parametrize("block", [slow(None), slow(16)])
def test_a_group_split_over_programs_adds_up_to_the_same(block: int | None, monkeypatch: pytest.MonkeyPatch):
    case, found = make_case(17, 4, random_evictions(17)), set()
    plan = layer_plan(case.evicted_at.to(DEVICE), block) if block else None
    for n_splits, n_resident in ((1, 1), (2, 2), (4, 1)):  # with 1, entries are loaded ahead
        monkeypatch.setattr(launch, "choose_n_splits", lambda *_, n=n_splits, **__: found.add(n) or n)
        monkeypatch.setattr(launch, "programs_per_multiprocessor", lambda *_, n=n_resident: n)
        assert max(errors(case, torch.float32, block)) <= bound(torch.float32)
        d_key, d_value = with_gradients(triton, case.to(torch.float32).to(DEVICE), plan=plan)[3:]
        if n_splits == 1:
            whole = (d_key, d_value)
        torch.testing.assert_close((d_key, d_value), whole)
    assert found == {1, 2, 4}


ONE_ROW = cache_evictions(33, prompt_lens=(6,))


def shifted(by: int) -> Tensor:
    evicted_at = ONE_ROW
    return torch.where((evicted_at > 0) & (evicted_at < NEVER), evicted_at + by, evicted_at)


WRONG = {
    "evictions one later": shifted(1),
    "evictions one earlier": shifted(-1),
    "heads swapped": ONE_ROW.flip(1),
    "one head's for all": ONE_ROW[:, :1],
}


@pytest.mark.parametrize(("wrong", "block"), diagonal(WRONG, [None, 16]))
def test_the_comparison_catches_another_table(wrong: str, block: int | None):
    evicted_at = WRONG[wrong]

    def wrong(query: Tensor, key: Tensor, value: Tensor, _: Tensor, scaling: float, **settings: object):
        return triton(query, key, value, evicted_at.to(DEVICE), scaling, **settings)

    plan = layer_plan(evicted_at.to(DEVICE), block) if block else None
    case = make_case(33, 2, ONE_ROW).to(DEVICE)
    assert min(excess_errors(wrong, case, torch.float32, plan=plan).values()) > 100.0


def test_the_comparison_catches_the_plan_of_another_table():
    stranger = layer_plan(cache_evictions(33, n_kv_heads=2, budget=6).to(DEVICE), 16)
    assert max(errors(make_case(33, 2, cache_evictions(33)), torch.float32, plan=stranger)) > 100.0


def test_the_comparison_catches_query_heads_in_another_order():
    def swapped(query: Tensor, *inputs: object, **settings: object) -> tuple[Tensor, Tensor]:
        out, lse = triton(query.roll(1, dims=1), *inputs, **settings)
        return out.roll(-1, dims=1), lse.roll(-1, dims=1)

    case = make_case(*ODD, random_evictions(33)).to(DEVICE)
    assert min(excess_errors(swapped, case, torch.float32).values()) > 100.0


@pytest.mark.parametrize("block", [slow(None), 16])
def test_two_calls_agree_bit_for_bit(block: int | None):
    case = make_case(*SHORT, random_evictions(17)).to(torch.float16).to(DEVICE)
    plan = layer_plan(case.evicted_at, block) if block else None
    first, second = (with_gradients(triton, case, plan=plan) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("block", [None, slow(16)])
def test_the_layout_of_inputs_in_memory_does_not_matter(block: int | None):
    case = make_case(*SHORT, random_evictions(17)).to(torch.float32).to(DEVICE)
    plan = layer_plan(case.evicted_at, block) if block else None
    by_position = with_gradients(triton, case, plan=plan)
    for move in (misaligned, spread_out):
        names = ("query", "key", "value", "out_weight")
        moved = Case(**{**vars(case), **{name: move(getattr(case, name)) for name in names}})
        for a, b in zip(with_gradients(triton, moved, plan=plan), by_position, strict=True):
            assert torch.equal(a, b)


def misaligned(tensor: Tensor) -> Tensor:
    """The same numbers, one element after an address that wide reads could start at."""
    buffer = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    return buffer.copy_(tensor)


def spread_out(tensor: Tensor) -> Tensor:
    """The same numbers, with others between neighbours."""
    buffer = tensor.new_full((*tensor.shape, 2), torch.nan)
    buffer[..., 0] = tensor
    return buffer[..., 0]


def test_the_output_is_laid_out_for_the_projection_that_reads_it():
    case = make_case(*SHORT, random_evictions(17)).to(torch.float32).to(DEVICE)
    out, lse = triton(case.query, case.key, case.value, case.evicted_at, case.scaling)
    assert out.transpose(1, 2).is_contiguous()
    assert lse.dtype == torch.float32


def test_keys_that_a_whole_block_sees_stand_first_in_its_list():
    # Blocks of 4 queries. Key 1 ends with the first query of block 1, key 2 with block 1, key 5 within it; no
    # query sees key 3.
    evicted_at = torch.tensor([[[NEVER, 5, 8, 3, NEVER, 6, NEVER, NEVER, NEVER]]], dtype=torch.int32)
    case = make_case(9, 1, evicted_at, n_kv_heads=1).to(torch.float32).to(DEVICE)
    inputs = launch.Inputs(case.query, case.key, case.value, case.evicted_at, 1.0, None, 4, 8)
    table, n_listed = launch._table(inputs).values()
    assert n_listed.tolist() == [[[[3, 0], [7, 2], [5, 4]]]]
    keys = [(entries >> 8)[:n].tolist() for entries, (n, _) in zip(table[0, 0], n_listed[0, 0], strict=True)]
    assert keys == [[0, 1, 2], [0, 2, 1, 4, 5, 6, 7], [0, 4, 6, 7, 8]]


@pytest.mark.gpu
@pytest.mark.parametrize("block", [None, 64, 128], ids=["contiguous", "blocks of 64", "blocks of 128"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_are_as_accurate_as_plain_torch_at_real_sizes(
    dtype: torch.dtype, dim: int, block: int | None
):
    evicted_at = cache_evictions(1537, prompt_lens=(300, 70), budget=256, interval=128)
    assert max(errors(make_case(1537, 4, evicted_at, dim=dim, dim_v=dim), dtype, block)) <= bound(dtype)


@pytest.mark.gpu
def test_a_call_of_forward_and_backward_never_waits_for_the_device():
    case = make_case(257, 2, cache_evictions(257)).to(torch.bfloat16).to("cuda")
    plan = layer_plan(case.evicted_at, 128)
    with_gradients(triton, case, plan=plan)
    inputs = [t.detach().requires_grad_() for t in (case.query, case.key, case.value)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = triton(*inputs, case.evicted_at, case.scaling, plan=plan)
        torch.autograd.grad(out.sum() + lse.nan_to_num(neginf=0.0).sum(), inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_definition_without_log_sum_exp_is_the_same_function():
    case = make_case(*SHORT, random_evictions(17)).to(torch.float32)
    inputs = (case.query, case.key, case.value, case.evicted_at, case.scaling)
    torch.testing.assert_close(
        reference.shadow_attention(*inputs), reference.shadow_attention_with_lse(*inputs)[0]
    )
