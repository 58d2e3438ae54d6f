import json
from dataclasses import replace

import pytest
import record
import torch
from kernel_parts import case
from kernel_parts.accuracy import WrongKernelError, excess_error, require_accurate
from kernel_parts.case import Arm, Case, Failure, Refusal, Setting, measure, try_to_measure
from kernel_parts.counts import Work, attention_work, decode_work, evict_work, head_work, score_work
from kernel_parts.table import record_row
from kernel_parts.timing import Ceilings, ceilings, seconds_of, spread, taking_turns

SETTING = Setting("cpu", is_toy=True, n_rounds=3)
LIMITS = Ceilings(copy_gb_per_s=100.0, matmul_tflops=1.0)


def test_quantiles_lie_between_measurements():
    # Eleven measurements: the second and the last but one are the 10th and the 90th percentile.
    found = spread([float(n) for n in range(11)])
    assert (found.median, found.p10, found.p90) == (5.0, 1.0, 9.0)
    assert spread([2.0]).p90 == 2.0


def test_calls_take_turns_and_start_from_the_same_state():
    log = []
    calls = {"a": lambda: log.append("a"), "b": lambda: log.append("b")}
    times = taking_turns(calls, "cpu", 2, prepare=lambda: log.append("-"))
    assert log == ["-", "a", "-", "b"] * 4  # two rounds that warm up, two that count
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}
    assert all(value >= 0 for value in seconds_of(lambda: None, "cpu", 3))


def test_ceilings_are_measured():
    found = ceilings("cpu")
    assert found.copy_gb_per_s > 0.1
    assert found.matmul_tflops > 1e-4


def test_decode_is_counted_by_hand():
    # 2 rows x 3 KV heads, 5 slots of 4 numbers of 2 bytes. K and V: 2 · 6 · 5 · 4 · 2 = 480. Queries and
    # outputs of 7 heads each: 2 · 6 · 7 · 4 · 2 = 672. Scores read and written: 2 · 6 · 5 · 4 = 240.
    # Flops: 42 query heads · 5 slots · (2 · 4 for q·k + 2 · 4 for p·v) = 3360.
    assert decode_work(6, 7, 5, 4, 2, n_score_passes=2) == Work(480 + 672 + 240, 3360)


def test_attention_is_counted_by_hand():
    # 10 pairs, dim 4: forward 2 products, backward 5, each 2 · 4 flops a pair: 7 · 8 · 10.
    # Bytes: q, o, dq.. of 4 heads and k, v, .. of 2, six passes over 3 tokens · 4 numbers · 2 bytes; and
    # log-sum-exp of 4 heads · 3 tokens written and read in 4 bytes.
    assert attention_work(10, 1, 4, 2, 3, 4, 2) == Work(6 * 6 * 24 + 2 * 48, 560)


def test_heads_scores_and_compactions_are_counted_by_hand():
    # Three products of [5, 4] and [4, 100], 2 · 5 · 4 · 100 flops each; weights three times, hidden twice.
    assert head_work(5, 4, 100, 2, 3, 3) == Work((3 * 400 + 2 * 20) * 2, 12_000)
    # Keys of 3 pools x 10 slots x 4 numbers x 2 bytes, and a float32 for each slot.
    assert score_work(3, 10, 1, 4, 2) == Work(240 + 120, 0)
    # 30 slots: score 4, column 8. 6 keys move: K, V read and written, 4 · 4 · 2 each, column 8. 9 evictions.
    assert evict_work(3, 10, 6, 9, 4, 2) == Work(30 * 12 + 6 * (32 + 8) + 9 * 4, 0)


def test_an_error_is_in_units_of_plain_torchs_own():
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    plain, actual = (truth + shift for shift in (0.01, 0.03))
    assert excess_error(actual, plain, truth) == pytest.approx(3.0)
    assert require_accurate("op", {"out": (actual, plain, truth)}) == pytest.approx(3.0)
    with pytest.raises(WrongKernelError, match="op: out is off by 5 of"):
        require_accurate("op", {"out": (truth + 0.05, plain, truth)})
    with pytest.raises(WrongKernelError, match="off by inf"):
        require_accurate("op", {"out": (truth * torch.nan, plain, truth)})


def toy_case(check=lambda: 1.0, **changes) -> Case:
    data = torch.zeros(250_000)  # a megabyte
    arms = (
        Arm("ours", lambda: data + 1.0, Work(2_000_000, 250_000)),
        Arm("other", lambda: (data + 1.0) + (data + 2.0), Work(4_000_000, 750_000)),
    )
    case = Case("op", "label", {"n": 250_000}, arms, check, inputs=(data,))
    return replace(case, **changes)


def test_a_case_is_measured_against_its_first_way():
    result = measure(toy_case(), SETTING, LIMITS)
    ours, other = result.arms
    assert ours.over_ours == 1.0
    assert other.over_ours == other.seconds.median / ours.seconds.median
    # 2 MB in the median's time, over 100 GB/s
    assert ours.share_of_ceiling == pytest.approx(2e6 / ours.seconds.median / 1e11)
    assert ours.peak_bytes == 1_000_000
    assert other.peak_bytes == 3_000_000
    row = json.loads(json.dumps(record_row(result, SETTING, LIMITS)))
    assert row["arms"][1]["name"] == "other"
    assert row["timed"] == "reference"


def test_the_matmul_ceiling_counts_flops():
    ours = measure(toy_case(bound="matmul"), SETTING, LIMITS).arms[0]
    assert ours.share_of_ceiling == pytest.approx(250_000 / ours.seconds.median / 1e12)


def test_a_way_that_cannot_run_is_named_and_the_others_are_measured():
    def fail() -> None:
        raise RuntimeError("no such backend\nand more")

    arms = toy_case().arms
    broken = Arm("broken", fail)
    result = measure(toy_case(arms=(*arms, broken)), SETTING, LIMITS)
    assert result.failed == (Failure("broken", "RuntimeError: no such backend", out_of_memory=False),)
    assert [arm.name for arm in result.arms] == ["ours", "other"]
    refused = try_to_measure(lambda: toy_case(arms=(broken,)), SETTING, LIMITS)
    assert isinstance(refused, Refusal)
    assert "no such backend" in refused.in_short


def test_a_lost_device_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(case, "is_device_lost", lambda: True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        try_to_measure(lambda: toy_case(arms=(Arm("broken", fail),)), SETTING, LIMITS)


def test_a_way_that_runs_out_of_memory_is_named_even_ours():
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    arms = toy_case().arms
    result = measure(toy_case(arms=(Arm("ours", full), arms[1])), SETTING, LIMITS)
    assert [(failed.name, failed.out_of_memory) for failed in result.failed] == [("ours", True)]
    assert [(arm.name, arm.over_ours) for arm in result.arms] == [("other", 1.0)]
    with pytest.raises(torch.OutOfMemoryError, match="no way of op, label can run"):
        measure(toy_case(arms=(Arm("ours", full),)), SETTING, LIMITS)


def test_a_wrong_kernel_is_never_timed():
    n_calls = []

    def refuse() -> float:
        raise WrongKernelError("off")

    arms = (Arm("ours", lambda: n_calls.append(1)),)
    with pytest.raises(WrongKernelError):
        measure(toy_case(refuse, arms=arms), SETTING, LIMITS)
    assert len(n_calls) == 1  # the first call, which compiles
    measure(toy_case(arms=arms), SETTING, LIMITS)
    assert len(n_calls) == 1 + 1 + (2 + 3) + 1  # first call, warm-up and rounds, memory


def test_provenance_leaves_out_what_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    assert record.provenance()["torch"] == torch.__version__
    assert "triton" in record.provenance()
    monkeypatch.setattr(record, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(record.shutil, "which", lambda name: None)
    found = record.provenance()
    assert "no-such-package" not in found
    assert found["commit"] == "unknown"
