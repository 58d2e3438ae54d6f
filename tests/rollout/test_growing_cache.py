"""A dense cache has slots for what its running rows have sampled, not for the longest response."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from lit_rlkv.kvcache import CacheSpec, SlotCache
from lit_rlkv.kvcache.slots import Slots
from lit_rlkv.models.preparation import prepare_backbone
from lit_rlkv.rollout import decoder, generate
from lit_rlkv.types import Rollout
from tests.models_zoo import HEAD_DIM, LAYERS, PAD, build, ragged_prompts, tiny_config
from tests.rollouts import LENS, gap, roll_out

WIDTH = max(LENS)
N_NEW, FIRST = 40, 5
SLOT_BYTES = 2 * LAYERS * 2 * HEAD_DIM * 4
"""Keys and values of a token, in two KV heads, float32."""


def run(cache: str | CacheSpec = "dense", **changes: Any) -> Rollout:
    return roll_out("llama", cache, max_new_tokens=N_NEW, **changes)


@cache
def eos() -> int:
    """A token at which the greedy rows stop at different lengths, one of them not at all."""
    responses = run(temperature=0.0).input_ids[:, WIDTH:]
    for token in responses.unique().tolist():
        lens = [row.index(token) + 1 if token in row else N_NEW for row in responses.tolist()]
        if len(set(lens)) >= 3 and N_NEW in lens:
            return int(token)
    raise AssertionError("no token of these rollouts stops rows at different lengths")


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Rows and slots of each time that the cache grew, which it does early here."""
    eos()  # its rollout is not counted
    seen: list[tuple[int, int]] = []
    resize = SlotCache.resize

    def recorded(cache: SlotCache, rows: torch.Tensor, n_slots: int) -> None:
        seen.append((len(rows), n_slots))
        resize(cache, rows, n_slots)

    monkeypatch.setattr(SlotCache, "resize", recorded)
    monkeypatch.setattr(decoder, "FIRST_TOKENS", FIRST)
    return seen


def close(a: Rollout, b: Rollout) -> bool:
    """Equal but for the rounding of log-probs, whose products have other shapes."""
    names = ("input_ids", "attention_mask", "response_mask", "evicted_at")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names) and torch.allclose(
        a.rollout_logps, b.rollout_logps, atol=1e-5
    )


def test_rows_that_all_run_grow_and_sample_the_same(sizes: list, monkeypatch: pytest.MonkeyPatch):
    grown = run()
    assert sizes == [(4, 29), (4, 44), (4, 54)]  # from 14 + 5, by half and one, to all that there are
    assert grown.kv_bytes == 4 * 54 * SLOT_BYTES
    monkeypatch.setattr(decoder, "FIRST_TOKENS", N_NEW)
    assert close(grown, run())
    assert len(sizes) == 3


@pytest.mark.parametrize("n", [1, 3])
def test_rows_that_have_ended_do_not_grow(n: int, sizes: list, monkeypatch: pytest.MonkeyPatch):
    settings = {"eos_token_id": eos(), "temperature": 0.0, "num_return_sequences": n}
    grown = run(**settings)
    rows = [4 * n, *(n_rows for n_rows, _ in sizes)]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > rows[-1]
    held = max(n_rows * n_slots for n_rows, n_slots in [(4 * n, WIDTH + FIRST), *sizes])
    assert grown.kv_bytes == held * SLOT_BYTES
    monkeypatch.setattr(decoder, "FIRST_TOKENS", N_NEW)
    reserved = run(**settings)
    assert reserved.kv_bytes == 4 * n * 54 * SLOT_BYTES > grown.kv_bytes
    assert close(grown, reserved)


@pytest.mark.parametrize("max_rows", [None, 6])
def test_rows_go_on_as_beside_those_that_have_ended(
    max_rows: int | None, sizes: list, monkeypatch: pytest.MonkeyPatch
):
    settings: dict = {"eos_token_id": list(range(4)), "num_return_sequences": 3, "max_rows": max_rows}
    for seed in range(3):
        with monkeypatch.context() as patch:
            grown = run(**settings, generator=torch.Generator().manual_seed(seed))
            patch.setattr(decoder, "FIRST_TOKENS", N_NEW)
            reserved = run(**settings, generator=torch.Generator().manual_seed(seed))
            never_evicts = CacheSpec("snapkv", budget=WIDTH + N_NEW, interval=4, sink=1, window=2)
            evicting = run(**settings, cache=never_evicts, generator=torch.Generator().manual_seed(seed))
        assert close(grown, reserved)
        if max_rows is None:  # otherwise a row ends at another check
            assert close(grown, evicting)
    assert min(n_rows for n_rows, _ in sizes) < 6


def test_a_compiled_step_keeps_its_rows(sizes: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoder, "CompiledLayers", lambda model: nullcontext())
    settings: dict = {"eos_token_id": list(range(4)), "num_return_sequences": 3}
    grown = run(**settings, compile_layers=True, generator=torch.Generator().manual_seed(0))
    assert {n_rows for n_rows, _ in sizes} == {12}
    assert close(grown, run(**settings, generator=torch.Generator().manual_seed(0)))


def test_keys_that_are_lost_on_the_way_are_noticed(sizes: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Slots, "widened", lambda slots, rows, n: slots.pool(len(rows), n))
    rollout = run()
    assert sizes
    assert gap("llama", rollout) > 1e-2


def test_an_evicting_cache_never_grows(sizes: list):
    run("snapkv", eos_token_id=eos())
    assert sizes == []


@pytest.mark.gpu
def test_a_captured_step_is_captured_anew_when_the_cache_grows(sizes: list):
    model = prepare_backbone(build(tiny_config("qwen3")).to("cuda"))
    prompts = [t.cuda() for t in ragged_prompts(LENS)]
    settings: dict[str, Any] = {"cache": CacheSpec.dense(), "max_new_tokens": N_NEW, "pad_token_id": PAD}
    first = generate(model, *prompts, eos_token_id=None, temperature=0.0, cuda_graph=False, **settings)
    eos_token_id = first.input_ids[:3, WIDTH + 20].tolist()
    captured, plain = (
        generate(model, *prompts, eos_token_id=eos_token_id, temperature=0.0, cuda_graph=graph, **settings)
        for graph in (True, False)
    )
    assert len(sizes) > 3
    assert torch.equal(captured.input_ids, plain.input_ids)
    assert captured.kv_bytes == plain.kv_bytes
