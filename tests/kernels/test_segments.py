"""Shadow attention in segments, against the definition."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lit_rlkv.kernels.shadow_attention import (
    flash,
    plan_segments,
    reference,
    segment_attention,
    segment_plan,
    segments,
)
from lit_rlkv.types import NEVER
from tests.kernels.accuracy import bound
from tests.kernels.segment_cases import PlainLibrary, segments_of
from tests.kernels.shadow_cases import Case, cache_evictions, excess_errors, make_case, random_evictions
from tests.kernels.test_shadow_blocks import dense, windows, with_sink

TABLES = {
    "random": random_evictions(61),
    "cache": cache_evictions(61),
    "window and chunks": windows(61),
    "one for all heads": cache_evictions(61, n_kv_heads=1),
    "no evictions": dense((0, 40), (7, 61)),
    "nothing cached": torch.zeros(2, 2, 61).int(),
}


def sliding(window: int, seq: int = 61) -> Tensor:
    """A window of so many keys; row 1 is padded at both ends."""
    evicted_at = (torch.arange(seq) + window).clamp(max=seq).expand(2, 2, -1).clone().int()
    evicted_at[1] = evicted_at[1].clamp(max=seq - 4)
    evicted_at[1, :, :3] = evicted_at[1, :, -4:] = 0
    return evicted_at


def in_segments(query, key, value, evicted_at, scaling, *, softcap=None, sink=None):
    return segment_attention(query, key, value, segments_of(evicted_at, key.shape[1]), scaling, sink)


def with_lse(query, key, value, evicted_at, scaling, **settings):
    """Attention in segments, and a log-sum-exp without a gradient in its errors."""
    out = in_segments(query, key, value, evicted_at, scaling, **settings)
    return out, reference.shadow_attention_with_lse(query, key, value, evicted_at, scaling, **settings)[1]


def errors(case: Case, attend=in_segments, n_value_dims: int | None = None) -> list[float]:
    """Largest errors of the output and the gradients to query, key, value and sink."""
    expected = with_sink(reference.shadow_attention, case, n_value_dims)
    found = with_sink(attend, case, n_value_dims)
    return [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("group", "dim_v", "n_value_dims"), [(1, 8, 3), (3, 24, None)])
def test_segments_are_the_definition(table, group, dim_v, n_value_dims):
    case = make_case(61, group, TABLES[table], dim_v=dim_v)
    assert max(errors(case, n_value_dims=n_value_dims)) < 1e-12


@pytest.mark.parametrize("table", ["random", "cache", "window and chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_are_as_accurate_as_the_definition(table, dtype):
    assert max(excess_errors(with_lse, make_case(61, 3, TABLES[table]), dtype).values()) <= bound(dtype)


@pytest.mark.parametrize("window", [1, 9, 60])
def test_a_sliding_window_is_one_sequence_for_each_row_and_head(window, monkeypatch):
    case = make_case(61, 3, sliding(window))
    assert plan_segments(case.evicted_at[:, None]).layers == (None,)  # torch's library for CPUs has none
    monkeypatch.setitem(flash.LIBRARIES, "cpu", library := PlainLibrary())
    assert max(errors(case)) < 1e-12
    if window < 58:  # else row 1 has no evictions, and a table has one kind of segment
        assert len(segments_of(case.evicted_at, 2).query_starts) == 1 + 4
        assert {call.window for call in library.calls} == {window}
    late = torch.where(case.evicted_at > 0, case.evicted_at + 1, 0)
    wrong = errors(case, lambda q, k, v, _, *rest, **options: in_segments(q, k, v, late, *rest, **options))
    assert min(wrong[:4]) > 1e-2 or window == 60


def test_a_window_with_other_evictions_is_cut_at_each_of_them():
    evicted_at = sliding(9)
    evicted_at[0, 0, 5] = 7
    assert max(errors(make_case(61, 2, evicted_at))) < 1e-12


@pytest.mark.parametrize(("limit", "value"), [("MAX_SEQUENCES", 3), ("MIN_PIECE", 1)])
def test_pieces_do_not_change_the_result(limit, value, monkeypatch):
    case = make_case(150, 2, cache_evictions(150, budget=40, interval=3))
    whole = segments_of(case.evicted_at, 2)
    monkeypatch.setattr(segment_plan, limit, value)
    pieces = [segment_plan.Piece(*fields) for fields in segments_of(case.evicted_at, 2).pieces.tolist()]
    assert len(pieces) > len(whole.pieces)
    assert max(errors(case)) < 1e-12
    sizes = [piece.end_query - piece.first_query + piece.end_key - piece.first_key for piece in pieces]
    assert max(sizes) < 2 * case.evicted_at.numel()
    assert max(piece.end - piece.begin for piece in pieces) <= segment_plan.MAX_SEQUENCES


def test_the_plan_of_a_row_by_hand():
    # Keys 0 to 2 are a prompt, of which 1 is evicted; then 2 and 3 after three queries more.
    evicted_at = torch.tensor([[[[8, 3, 6, 6, 8, 8, 8, 8]]]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_plan, "MIN_QUERIES", 2)
        layer = plan_segments(evicted_at).layer(0, 1)
    assert layer.queries.tolist() == [0, 1, 2, 6, 7, 3, 4, 5]  # without old keys first, then the shorter
    assert layer.query_starts.tolist() == [0, 3, 5, 8]
    assert layer.keys.tolist() == [0, 4, 5, 0, 2]
    assert layer.key_starts.tolist() == [0, 0, 3, 5]


def test_segments_that_do_not_pay_have_no_plan(monkeypatch):
    table = cache_evictions(150, budget=40, interval=8)[:, None]
    assert plan_segments(table) is None  # 150 cells each have 18 segments at most
    monkeypatch.setattr(segment_plan, "MIN_QUERIES", 8)
    assert plan_segments(table) is not None
    monkeypatch.setattr(segment_plan, "MAX_OLD", 0.5)
    assert plan_segments(table) is None
    assert plan_segments(table[:0]) is None


def shifted(layer):
    """The last query of a segment belongs to the next one."""
    starts, pieces = layer.query_starts.clone(), layer.pieces.clone()
    for begin, end in pieces[:, :2].tolist():
        starts[begin + 1 : end] -= 1
    pieces[:, segment_plan.Piece._fields.index("longest")] += 1
    return replace(layer, query_starts=starts, pieces=pieces)


def doubled(layer):
    keys = layer.keys.clone()
    keys[0] = keys[1]
    return replace(layer, keys=keys)


WRONG_PLANS = {
    "a segment off by one": shifted,
    "heads swapped": lambda layer: replace(layer, keys=layer.keys ^ 1),
    "an old key twice": doubled,
    "without old keys": lambda layer: replace(layer, keys=layer.keys.roll(1)),
}


def one_sequence_at_a_time(monkeypatch):
    """A library that takes any lengths, and pieces of all sequences of a kind."""
    monkeypatch.setitem(flash.LIBRARIES, "cpu", PlainLibrary())
    monkeypatch.setattr(segment_plan, "_kind", lambda has_own, length, n_keys: 2 * has_own + (n_keys > 0))


@pytest.mark.parametrize("wrong", WRONG_PLANS)
def test_the_comparison_catches_wrong_plans(wrong, monkeypatch):
    one_sequence_at_a_time(monkeypatch)
    case = make_case(61, 2, TABLES["cache"])
    assert max(errors(case)) < 1e-12

    def mistaken(query, key, value, evicted_at, scaling, *, softcap, sink):
        layer = WRONG_PLANS[wrong](segments_of(evicted_at, 2))
        return segment_attention(query, key, value, layer, scaling, sink)

    assert min(errors(case, mistaken)[:4]) > 1e-2


def without_its_lse(parts):
    return sum(out for out, _ in parts), parts[0][1]


def test_the_comparison_catches_a_merge_without_the_lse_of_the_other_part(monkeypatch):
    case = make_case(61, 2, TABLES["cache"])
    merged = segments._merged
    monkeypatch.setattr(segments, "_merged", without_its_lse)
    assert min(errors(case)[:4]) > 1e-2
    # In the backward pass alone: the gradients of each part by itself.
    monkeypatch.setattr(segments, "_merged", merged)
    library = flash.LIBRARIES["cpu"]

    def of_the_part_alone(d_out, query, key, value, out, lse, call):
        return library.backward(d_out, query, key, value, *library.forward(query, key, value, call), call)

    monkeypatch.setitem(flash.LIBRARIES, "cpu", library._replace(backward=of_the_part_alone))
    found = errors(case)
    assert found[0] < 1e-12
    assert min(found[1:4]) > 1e-2


def test_what_is_on_padding_changes_nothing():
    case = make_case(61, 3, TABLES["cache"])
    is_padding = (case.evicted_at == 0).all(1)[:, None, :, None]
    assert is_padding.any()
    poisoned = replace(
        case,
        **{
            name: getattr(case, name).masked_fill(is_padding, torch.nan) for name in ("query", "key", "value")
        },
    )
    for found, expected in zip(with_sink(in_segments, poisoned), with_sink(in_segments, case), strict=True):
        assert torch.equal(found, expected)


def test_the_operation_is_registered_for_checkpoints_autocast_and_the_compiler():
    case = make_case(61, 2, TABLES["cache"]).to(torch.float32)
    layer = segments_of(case.evicted_at, 2)
    inputs = [each.detach().requires_grad_() for each in (case.query, case.key, case.value)]

    def gradients(run):
        return torch.autograd.grad((run(*inputs) * case.out_weight).sum(), inputs)

    attend = partial(segment_attention, segments=layer, scaling=case.scaling)
    expected = gradients(attend)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for run in (partial(checkpoint, attend, use_reentrant=False), compiled):
        for found, right in zip(gradients(run), expected, strict=True):
            assert torch.equal(found, right)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*inputs).dtype == torch.bfloat16
    plan = (layer.queries, layer.keys, layer.query_starts, layer.key_starts, layer.pieces)
    for sink in (torch.randn(4, requires_grad=True), torch.zeros(0)):
        torch.library.opcheck(segments._forward, (*inputs, sink, *plan, 2, case.scaling))


def test_which_shapes_and_types_the_library_takes():
    assert flash.fits("cpu", torch.float64, 7, None)
    assert flash.fits("cuda", torch.bfloat16, 128, None)
    assert not flash.fits("cuda", torch.float32, 128, None)
    assert not flash.fits("cuda", torch.bfloat16, 12, None)
    assert not flash.fits("cuda", torch.bfloat16, 264, None)
    assert not flash.fits("cpu", torch.float32, 16, 50.0)
    assert not flash.fits("mps", torch.float32, 16, None)


@pytest.mark.parametrize("window", [None, 0, 9])
def test_calls_on_cuda_are_those_of_the_installed_torch(window):
    """By tensors without data, on a device that need not be there."""
    with FakeTensorMode():
        make = partial(torch.empty, device="cuda")
        query, key = make(100, 8, 64, dtype=torch.bfloat16), make(70, 2, 64, dtype=torch.bfloat16)
        starts = make(5, dtype=torch.int32)
        call, library = flash.Call(starts, starts, 1, 30, window, 0.1), flash.LIBRARIES["cuda"]
        out, lse = library.forward(query, key, key, call)
        assert (out.shape, lse.shape, lse.dtype) == (query.shape, (100, 8), torch.float32)
        gradients = library.backward(out, query, key, key, out, lse, call)
        assert [each.shape for each in gradients] == [query.shape, key.shape, key.shape]


def test_what_runs_on_the_device_waits_for_no_number():
    """By tensors without data, of which a number would raise."""
    with FakeTensorMode():
        table, is_query = torch.empty(2, 2, 61, dtype=torch.int32), torch.empty(2, 61, dtype=torch.bool)
        cuts = segment_plan._cut(table, is_query, 10)
        assert cuts.facts.shape == (11, 4)
        rank, tokens = torch.empty(20, dtype=torch.long), torch.empty(122, dtype=torch.long)
        assert segment_plan._old_keys(cuts, rank, 50, tokens).shape == (50,)
        assert segments._sums(torch.empty(70, 2, 64), torch.empty(70).long(), 40).shape == (40, 2, 64)
        with pytest.raises(DataDependentOutputException):
            cuts.number[-1].item()


GPU_TABLES = {
    "cache": cache_evictions(1000, prompt_lens=(300, 37), budget=128, interval=64),
    "interval 1": cache_evictions(200, budget=40, interval=1),
    "window": sliding(100, 700),
    "no evictions": dense((0, 700), (30, 650), seq=700),
    "one for all heads": cache_evictions(600, n_kv_heads=1, budget=100, interval=32),
    "NEVER": torch.full((1, 2, 300), NEVER).int(),
}


@pytest.mark.gpu
@pytest.mark.parametrize("table", GPU_TABLES)
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_segments_on_a_gpu_are_as_accurate_as_the_definition(table, dim, dim_v, dtype):
    evicted_at = GPU_TABLES[table]
    case = make_case(evicted_at.shape[-1], 4, evicted_at, dim=dim, dim_v=dim_v).to("cuda")
    assert max(excess_errors(with_lse, case, dtype).values()) <= bound(dtype)


@pytest.mark.gpu
def test_sinks_on_a_gpu_are_those_of_the_definition():
    case = make_case(1000, 4, GPU_TABLES["cache"], dim=64, dim_v=64).to("cuda").to(torch.bfloat16)
    truth = with_sink(reference.shadow_attention, case.to(torch.float64))
    plain = with_sink(reference.shadow_attention, case)
    for found, own, right in zip(with_sink(in_segments, case), plain, truth, strict=True):
        assert (found.double() - right).norm() <= 2 * (own.double() - right).norm()


@pytest.mark.gpu
def test_the_host_waits_once_for_the_plan_and_never_for_the_attention():
    case = make_case(1000, 4, GPU_TABLES["cache"], dim=64, dim_v=64).to("cuda").to(torch.bfloat16)
    table = case.evicted_at[:, None].repeat(1, 3, 1, 1)
    plan_segments(table)  # compiles nothing, but allocates pinned memory
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            layer = plan_segments(table).layer(0, 2)
        inputs = [each.detach().requires_grad_() for each in (case.query, case.key, case.value)]
        torch.cuda.set_sync_debug_mode("error")
        out = segment_attention(*inputs, layer, case.scaling)
        torch.autograd.grad((out * case.out_weight).sum(), inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1
