"""Captures that fail, on a CPU: what CUDA would do is replaced at its border."""

import logging
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch

from lit_rlkv.kvcache import POLICIES, CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.rollout import decoder, generate, graph
from lit_rlkv.rollout.graph import CudaGraphRunner
from tests.models_zoo import PAD, build, ragged_prompts, tiny_config
from tests.rollout.test_decoder import run, stops

FAILURE = "operation not permitted when stream is capturing"


@pytest.fixture
def _fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are graphs where `Decoder` would not ask for CUDA, and no capture succeeds."""

    def capture(function: Callable[[], None], generator: torch.Generator | None) -> Any:
        raise RuntimeError(FAILURE)

    monkeypatch.setattr(graph, "_capture", capture)
    monkeypatch.setattr(graph, "_on_side_stream", lambda function: function())
    make = CudaGraphRunner.__init__

    def enabled(
        self: CudaGraphRunner, generator: Any, *, is_enabled: bool, is_required: bool = False
    ) -> None:
        make(self, generator, is_enabled=True, is_required=is_required)

    monkeypatch.setattr(CudaGraphRunner, "__init__", enabled)


@pytest.mark.usefixtures("_fake_cuda")
@pytest.mark.parametrize("policy", ["snapkv", "dense"])
def test_a_capture_that_fails_leaves_the_rollout_as_it_is_and_warns_once(
    policy: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    settings: dict[str, Any] = {"eos_token_id": stops(run(policy)), "max_rows": 4}
    caplog.clear()
    fallen_back = run(policy, **settings)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        f"decoding without a CUDA graph, which is slower: the capture failed ({FAILURE})"
    ]
    monkeypatch.undo()
    plain = run(policy, **settings)
    assert torch.equal(fallen_back.input_ids, plain.input_ids)
    assert torch.equal(fallen_back.evicted_at, plain.evicted_at)
    # The steps before the capture read empty slots too, and a longer sum may be rounded otherwise.
    torch.testing.assert_close(fallen_back.rollout_logps, plain.rollout_logps, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("_fake_cuda")
def test_a_graph_that_is_required_and_fails_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[generate.__module__], "_check_rows", lambda *_: None)  # refuses a CPU
    with pytest.raises(ValueError, match=rf"cannot be captured as a CUDA graph \({FAILURE}\); set rollout"):
        run(cuda_graph=True)


@pytest.mark.usefixtures("_fake_cuda")
@pytest.mark.parametrize("is_required", [True, False])
def test_memory_that_runs_out_in_a_capture_is_no_reason_to_go_on(
    is_required: bool, monkeypatch: pytest.MonkeyPatch
):
    def capture(function: Callable[[], None], generator: torch.Generator | None) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graph, "_capture", capture)
    runner = CudaGraphRunner(None, is_enabled=True, is_required=is_required)
    runner(int)
    runner(int)
    with pytest.raises(torch.OutOfMemoryError):
        runner(int)
    assert runner.is_enabled


@pytest.mark.gpu
def test_a_capture_that_fails_restores_the_stream_and_is_told_by_its_cause(caplog: pytest.LogCaptureFixture):
    before, number = torch.cuda.current_stream(), torch.ones((), device="cuda")
    runner = CudaGraphRunner(None, is_enabled=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            runner(lambda: number.item())
    assert torch.cuda.current_stream() == before
    assert not runner.is_enabled
    assert "capturing" in caplog.text
    # The allocator no longer acts as if the capture went on: it gives memory back.
    block = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    n_reserved = torch.cuda.memory_reserved()
    del block
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < n_reserved


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_pool_of_a_broken_capture_is_freed_once(has_ended: bool, monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []

    def end(device: int, pool: tuple[int, int]) -> None:
        calls.append(("end", device, pool))
        if has_ended:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)

    def release(device: int, pool: tuple[int, int]) -> None:
        calls.append(("release", device, pool))

    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    graph._leave_pool(1, (0, 7))
    ended = ("end", 1, (0, 7))
    assert calls == [ended] if has_ended else [ended, ("release", 1, (0, 7))]


@pytest.mark.usefixtures("_fake_cuda")
def test_a_policy_whose_eviction_cannot_be_captured_is_remembered(monkeypatch: pytest.MonkeyPatch):
    class Replayed:
        def __init__(self, function: Callable[[], None]) -> None:
            self.replay = function

    captured = []

    def capture(function: Callable[[], None], generator: torch.Generator | None) -> Any:
        captured.append(function.__name__)
        if function.__name__ == "evict":
            raise RuntimeError(FAILURE)
        return Replayed(function)

    monkeypatch.setattr(graph, "_capture", capture)
    monkeypatch.setattr(decoder, "NOT_CAPTURED", (remembered := WeakSet()))
    run("snapkv")
    assert set(remembered) == {POLICIES["snapkv"]}
    # The step is captured anew, with the state that the failed capture has given the generator.
    assert captured == ["_decode", "evict", "_decode"]


@pytest.mark.gpu
def test_a_policy_whose_eviction_cannot_be_captured_warns_in_its_first_rollout_alone(
    caplog: pytest.LogCaptureFixture,
):
    class Waits(POLICIES["knorm"]):
        def score(self, view: Any) -> Any:
            torch.ones((), device="cuda").item()
            return super().score(view)

    model = prepare_backbone(build(tiny_config("qwen3")).to("cuda"))
    cache = CacheSpec(policy=Waits, budget=8, interval=3, sink=1, window=3)
    settings: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": PAD}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            generate(model, *(t.cuda() for t in ragged_prompts((14, 9))), cache=cache, **settings)
    assert caplog.text.count("the capture failed") == 1
