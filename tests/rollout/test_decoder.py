"""Rows that come and go: samples of one prompt, prompts that wait, steps that run without Python."""

import gc
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lit_rlkv.kernels.decode_attention import decode_attention
from lit_rlkv.kernels.quantization import KV_DTYPES
from lit_rlkv.kvcache import POLICIES, CacheSpec, SlotCache
from lit_rlkv.models import prepare_backbone
from lit_rlkv.rollout import generate
from lit_rlkv.rollout.recorders import EvictionRecorder
from lit_rlkv.types import NEVER, Rollout
from tests.models.test_attention_sinks import gpt_oss
from tests.models.test_hybrids import hybrid
from tests.models.test_sliding_windows import windowed
from tests.models_zoo import PAD, build, ragged_prompts, tiny_config, tiny_model
from tests.rollout.recorded import RecordedRunner, Recording
from tests.rollouts import NOTICED, TOLERANCE, gap, roll_out, same, spec_of
from tests.tiers import diagonal, slow

LENS = (14, 9, 4, 1, 11, 6)
N_NEW = 24
DETERMINISTIC = sorted({name for name, policy in POLICIES.items() if not policy.draws} | {"dense"})


def some_of(policies: Iterable[str]) -> list[Any]:
    """A policy of each kind of evidence in the short tier: attention, queries, keys; and none evicted."""
    return [p if p in ("h2o", "snapkv", "keydiff", "dense") else slow(p) for p in policies]


def run(policy: str | CacheSpec = "snapkv", **changes: Any) -> Rollout:
    return roll_out("llama", policy, LENS, **{"max_new_tokens": N_NEW} | changes)


def stops(rollout: Rollout) -> list[int]:
    """Tokens that end the responses of a rollout at different lengths, some soon and some late."""
    n_prompt = int((~rollout.response_mask).all(dim=0).sum())
    responses = rollout.input_ids[:, n_prompt:]
    return [int(responses[row, 1 + 3 * row]) for row in range(0, len(responses), 2)]


class Forwards:
    """Sizes of the forwards of the model: (rows, columns)."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __enter__(self) -> "Forwards":
        embedding = tiny_model().get_input_embeddings()
        self.hook = embedding.register_forward_hook(lambda *a: self.shapes.append(tuple(a[1][0].shape)))
        return self

    def __exit__(self, *exception: Any) -> None:
        self.hook.remove()


@pytest.mark.parametrize("policy", some_of(DETERMINISTIC))
def test_greedy_samples_of_a_prompt_are_those_of_the_prompt_given_again(policy: str):
    input_ids, is_prompt = ragged_prompts(LENS)
    together = run(policy, temperature=0.0, num_return_sequences=3)
    settings = {"cache": spec_of(policy), "max_new_tokens": N_NEW, "eos_token_id": None, "pad_token_id": PAD}
    again = generate(
        tiny_model(),
        input_ids.repeat_interleave(3, dim=0),
        is_prompt.repeat_interleave(3, dim=0),
        temperature=0.0,
        **settings,
    )
    assert same(together, again)


def test_a_prompt_is_prefilled_once_for_all_its_samples():
    with Forwards() as forwards:
        rollout = run(num_return_sequences=4)
    assert forwards.shapes[0] == (len(LENS), max(LENS))
    assert set(forwards.shapes[1:]) == {(4 * len(LENS), 1)}
    assert len(rollout.input_ids) == 4 * len(LENS)


def test_samples_of_a_prompt_differ_and_under_random_eviction_keep_different_keys_of_it():
    rollout = run("random", num_return_sequences=2)
    assert not torch.equal(rollout.input_ids[0], rollout.input_ids[1])
    # Prompt 0 has 14 tokens and the budget is 8: six die at its end, in each sample others.
    dies_with_prompt = rollout.evicted_at[:2, ..., :14] == 14
    assert (dies_with_prompt.sum(-1) == 6).all()
    assert not torch.equal(dies_with_prompt[0], dies_with_prompt[1])


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "tova", "expected", "dense"])
def test_samples_of_a_prompt_share_what_is_kept_of_it(policy: str):
    rollout = run(policy, num_return_sequences=2)
    at_prefill = rollout.evicted_at[..., :14] == 14
    assert torch.equal(at_prefill[0::2], at_prefill[1::2])
    assert not torch.equal(rollout.input_ids[0], rollout.input_ids[1])


# Not knorm: keys of one token have equal norms, and rounding, which depends on the batch, picks among them.
@pytest.mark.parametrize(
    ("policy", "max_rows"), diagonal([policy for policy in DETERMINISTIC if policy != "knorm"], [2, 5])
)
def test_waiting_prompts_give_the_same_greedy_rollout(policy: str, max_rows: int):
    settings = {"temperature": 0.0, "eos_token_id": stops(run(policy, temperature=0.0))}
    everyone = run(policy, **settings)
    lengths = everyone.response_mask.sum(dim=1)
    assert len(lengths.unique()) >= 3
    waited = run(policy, **settings, max_rows=max_rows)
    assert same(waited, everyone)
    assert waited.kv_bytes * len(LENS) == everyone.kv_bytes * max_rows


def test_a_row_that_comes_free_is_taken_before_the_others_have_ended():
    settings = {"temperature": 0.0, "eos_token_id": stops(run(temperature=0.0))}
    lengths = run(**settings).response_mask.sum(dim=1).tolist()
    with Forwards() as forwards:
        run(**settings, max_rows=2)
    n_steps = sum(shape == (2, 1) for shape in forwards.shapes)
    # Two rows by hand: a prompt goes to the one that is free first; the first token comes from prefill, and
    # whether it ended the response shows after a step.
    busy_until = [0, 0]
    for length in lengths:
        busy_until[busy_until.index(min(busy_until))] += max(length - 1, 1)
    assert n_steps == max(busy_until)
    in_pairs = sum(max(pair) - 1 for pair in zip(lengths[0::2], lengths[1::2], strict=True))
    assert n_steps < in_pairs


def test_the_samples_of_a_prompt_wait_until_all_of_them_find_a_row():
    with Forwards() as forwards:
        run(num_return_sequences=2, max_rows=5)
    assert forwards.shapes[0] == (2, max(LENS))  # five rows hold two groups of two
    assert forwards.shapes[1] == (4, 1)


def test_the_cache_is_freed_with_the_rollout_not_at_the_next_garbage_collection(
    monkeypatch: pytest.MonkeyPatch,
):
    pools, begin = [], SlotCache.begin

    def watched(cache: SlotCache, *args: Any):
        pools.append(weakref.ref(cache))
        return begin(cache, *args)

    run(max_rows=2)  # the first use of a model tries it with a cache of its own
    monkeypatch.setattr(SlotCache, "begin", watched)
    gc.disable()
    try:
        run(max_rows=2)
        assert len(pools) == 3
        assert all(pool() is None for pool in pools)
    finally:
        gc.enable()


def test_the_cache_is_freed_before_the_record_is_finished(monkeypatch: pytest.MonkeyPatch):
    held, finish = [], EvictionRecorder.finish

    def watched(recorder: EvictionRecorder, *args: Any):
        held.extend(layer.kv_bytes for layer in recorder._kv.slot_layers)
        return finish(recorder, *args)

    monkeypatch.setattr(EvictionRecorder, "finish", watched)
    assert run().kv_bytes > 0
    assert set(held) == {0}


@pytest.mark.parametrize(("policy", "max_rows"), diagonal([*POLICIES, "dense"], [None, 2]))
def test_a_step_replayed_without_its_python_gives_the_same_rollout(
    policy: str, max_rows: int | None, monkeypatch: pytest.MonkeyPatch
):
    # A graph reads empty slots too, and a longer sum may be rounded otherwise.
    monkeypatch.setattr(SlotCache, "n_filled", None)
    settings: dict[str, Any] = {"max_rows": max_rows, "eos_token_id": stops(run(policy))}
    plain = run(policy, **settings)
    monkeypatch.setattr("lit_rlkv.rollout.decoder.CudaGraphRunner", RecordedRunner)
    before = RecordedRunner.n_replays
    assert same(run(policy, **settings), plain)
    assert RecordedRunner.n_replays > before + 5


def test_without_a_graph_attention_reads_no_slot_that_no_row_has_filled(monkeypatch: pytest.MonkeyPatch):
    widths: list[int] = []

    def watched(query: torch.Tensor, keys: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
        widths.append(keys.shape[2])
        return decode_attention(query, keys, *args, **settings)

    monkeypatch.setattr("lit_rlkv.kvcache.layer.decode_attention", watched)
    sliced = run("dense")
    n_layers = len(widths) // (N_NEW - 1)
    assert widths[::n_layers] == [max(LENS) + 1 + step for step in range(N_NEW - 1)]
    widths.clear()
    monkeypatch.setattr(SlotCache, "n_filled", None)
    whole = run("dense")
    assert set(widths) == {max(LENS) + N_NEW}
    assert torch.equal(sliced.input_ids, whole.input_ids)
    torch.testing.assert_close(sliced.rollout_logps, whole.rollout_logps, rtol=0, atol=1e-5)


def test_a_recording_of_a_step_that_python_steers_does_not_replay():
    count = 0
    total = torch.zeros(())

    def step() -> None:
        nonlocal count
        count += 1
        total.add_(count)

    with Recording() as recording:
        step()
    recording.replay()
    assert float(total) == 2  # and not 1 + 2


def test_a_recording_refuses_what_waits_for_the_device():
    with pytest.raises(RuntimeError, match="waits for the device"), Recording():
        torch.ones(3).sum().item()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_return_sequences": 0}, "num_return_sequences must be a whole number of at least 1, got 0"),
        (
            {"num_return_sequences": 3, "max_rows": 2},
            "max_rows must be at least num_return_sequences=3, got 2",
        ),
        ({"cuda_graph": True}, "cuda_graph=true needs a model on CUDA, and this one is on cpu"),
        ({"n_splits": 129}, "n_splits must be 1 to 128, got 129"),
        ({"n_splits": 4}, r"n_splits=4 needs the Triton kernel .* run on cpu in torch.float32"),
    ],
)
def test_rows_and_graphs_that_cannot_be_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        run(**changes)


QWEN3 = partial(tiny_config, "qwen3")
KINDS: dict[str, tuple[Callable[[], PreTrainedModel], CacheSpec, dict[str, Any]]] = {
    "windows": (partial(windowed, "gemma3"), spec_of("h2o"), {}),
    "states": (partial(hybrid, "qwen3_5"), spec_of("snapkv"), {}),
    "sinks": (gpt_oss, spec_of("tova", window=2), {"record_routing": True}),
    "chunks": (lambda: build(QWEN3()), spec_of("h2o"), {"prefill_chunk": 3}),
    **{kv: (lambda: build(QWEN3()), spec_of("h2o", dtype=kv), {}) for kv in KV_DTYPES},
}
"""Models, caches and options whose steps differ from those of plain attention to numbers."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_every_kind_of_layer_and_key_are_captured(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
):
    make, spec, options = KINDS[kind]
    model, is_cpu = prepare_backbone(make().to(device)), device == "cpu"
    monkeypatch.setattr(SlotCache, "n_filled", None)  # a graph reads empty slots too
    plain = roll_out(model, spec, LENS, max_new_tokens=N_NEW, cuda_graph=None if is_cpu else False, **options)
    if is_cpu:
        monkeypatch.setattr("lit_rlkv.rollout.decoder.CudaGraphRunner", RecordedRunner)
    captured = roll_out(
        model, spec, LENS, max_new_tokens=N_NEW, cuda_graph=None if is_cpu else True, **options
    )
    assert torch.equal(captured.input_ids, plain.input_ids)
    assert torch.equal(captured.evicted_at, plain.evicted_at)
    assert gap(model, captured) < TOLERANCE
    assert gap(model, captured, shadow=False) > NOTICED


def on_a_gpu(policy: str, **options: Any) -> tuple[PreTrainedModel, Rollout, Rollout]:
    """Return a model, and its rollouts with and without a captured step."""
    model = prepare_backbone(build(tiny_config("qwen3")).to("cuda"))
    captured, plain = (
        roll_out(model, policy, LENS, max_new_tokens=N_NEW, cuda_graph=is_graph, **options)
        for is_graph in (True, False)
    )
    return model, captured, plain


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [policy for policy in DETERMINISTIC if policy != "knorm"])
@pytest.mark.parametrize("max_rows", [None, 4])
def test_a_captured_step_gives_the_same_greedy_rollout_on_a_gpu(policy: str, max_rows: int | None):
    # Not by key norm: this model normalises its keys, whose norms are then ties that rounding decides.
    _, captured, plain = on_a_gpu(policy, temperature=0.0, max_rows=max_rows)
    assert same(captured, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["dense", "snapkv", "random"])
def test_a_captured_step_samples_what_a_plain_one_does_on_a_gpu(policy: str):
    model, captured, plain = on_a_gpu(policy, top_k=20)
    assert torch.equal(captured.input_ids, plain.input_ids)
    assert torch.equal(captured.evicted_at, plain.evicted_at)
    assert gap(model, captured) < TOLERANCE


@pytest.mark.parametrize("policy", some_of(DETERMINISTIC))
def test_a_budget_with_room_for_all_takes_the_memory_of_a_dense_cache_and_evicts_nothing(policy: str):
    roomy = CacheSpec.dense() if policy == "dense" else CacheSpec(policy=policy, budget=1000, interval=100)
    found, dense = run(roomy), run("dense")
    assert found.kv_bytes == dense.kv_bytes
    assert torch.equal(found.evicted_at, dense.evicted_at)
    assert torch.equal(found.input_ids, dense.input_ids)
    # Long prompts are cut to the budget at once, and then there is room for the rest of the sequence.
    only_prompts = CacheSpec(policy="snapkv", budget=8, interval=100, sink=1, window=3)
    cut = run(only_prompts)
    assert cut.kv_bytes == dense.kv_bytes
    assert (cut.evicted_at < NEVER).any()
    assert gap("llama", cut) < TOLERANCE
