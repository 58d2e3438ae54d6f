"""Turns: responses that go on after an answer, waiting or not, are what was said and are replayed exactly."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lit_rlkv.kvcache import POLICIES, CacheSpec
from lit_rlkv.models import prepare_backbone, replay_logps
from lit_rlkv.rollout import Rollout, generate
from lit_rlkv.rollout.turns import last_turn, turn_starts
from tests.fuzz import explicit
from tests.models import test_hybrids, test_sliding_windows
from tests.models_zoo import PAD, build, ragged_prompts, tiny_config, tiny_model
from tests.rollout.conversations import Talk
from tests.tiers import diagonal

TOLERANCE = 1e-4
LENS = (31, 22, 9, 1)
ENDS = (5, 6, 7, 8)
"""Several end tokens, so that turns end soon."""


def spec_of(policy: str) -> CacheSpec:
    return (
        CacheSpec.dense()
        if policy == "dense"
        else CacheSpec(policy=policy, budget=8, interval=3, sink=1, window=3)
    )


def talk_through(model: PreTrainedModel, spec: CacheSpec, talk: Talk, **options: Any) -> Rollout:
    settings: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": ENDS, "num_return_sequences": 2}
    return generate(
        model,
        *(tokens.to(model.device) for tokens in ragged_prompts(LENS)),
        cache=spec,
        pad_token_id=PAD,
        generator=torch.Generator(model.device).manual_seed(0),
        conversations=talk,
        **settings | options,
    )


def gap(model: PreTrainedModel, rollout: Rollout) -> float:
    with torch.no_grad():
        return float((replay_logps(model, rollout) - rollout.rollout_logps).abs().max())


def check_tokens(rollout: Rollout, talk: Talk) -> None:
    """After each prompt stand the turns as sampled and the answers as given, and nothing else."""
    for place in range(len(rollout.input_ids)):
        turns, given = talk.turns[place], talk.given.get(place, [])
        row, first = rollout.input_ids[place], max(LENS)
        expected = [id_ for pair in zip(turns, [*given, []], strict=False) for part in pair for id_ in part]
        is_sampled = [
            is_turn
            for pair in zip(turns, [*given, []], strict=False)
            for part, is_turn in zip(pair, (True, False), strict=True)
            for _ in part
        ]
        assert row[first : first + len(expected)].tolist() == expected
        assert rollout.response_mask[place, first : first + len(expected)].tolist() == is_sampled
        assert rollout.attention_mask[place, first:].sum() == len(expected)
        assert all(turn[-1] in ENDS for turn in turns[:-1])


@pytest.mark.parametrize("delay_s", [0.0, 0.03])
@pytest.mark.parametrize(("policy", "chunk"), diagonal(["dense", *POLICIES], [None, 3, 7]))
def test_conversations_are_what_was_said_and_replayed_exactly(policy: str, chunk: int | None, delay_s: float):
    model, talk = tiny_model("qwen3"), Talk(delay_s=delay_s)
    rollout = talk_through(model, spec_of(policy), talk, prefill_chunk=chunk)
    check_tokens(rollout, talk)
    assert turn_starts(rollout.response_mask).sum(dim=1).max() > 2
    assert gap(model, rollout) < TOLERANCE


@pytest.mark.parametrize("policy", ["dense", "h2o", "snapkv"])
@pytest.mark.parametrize("options", [{"max_rows": 4}, {"max_rows": 2}, {"top_k": 20}, {"max_new_tokens": 21}])
def test_rows_that_wait_are_resumed_beside_others(policy: str, options: dict[str, Any]):
    model, talk = tiny_model("qwen3"), Talk(max_turns=3, delay_s=0.05)
    rollout = talk_through(model, spec_of(policy), talk, **options)
    check_tokens(rollout, talk)
    assert gap(model, rollout) < TOLERANCE


STEPS = [
    ("cpu", None),
    pytest.param("cuda", False, marks=pytest.mark.gpu),
    pytest.param("cuda", True, marks=pytest.mark.gpu),
]
"""A device, and whether its steps are a captured graph, which writes to rows that wait, too."""


@pytest.mark.parametrize(("device", "cuda_graph"), STEPS)
@pytest.mark.parametrize("policy", ["dense", "h2o", "snapkv", "random"])
def test_rows_are_paused_beside_steps_of_any_kind(policy: str, device: str, cuda_graph: bool | None):
    model, talk = prepare_backbone(build(tiny_config("qwen3")).to(device)), Talk(max_turns=3, delay_s=0.05)
    rollout = talk_through(model, spec_of(policy), talk, max_rows=4, cuda_graph=cuda_graph)
    check_tokens(rollout, talk)
    assert turn_starts(rollout.response_mask).sum(dim=1).max() > 2
    assert gap(model, rollout) < TOLERANCE


@pytest.mark.parametrize(("device", "cuda_graph"), STEPS)
def test_rows_that_are_not_paused_lose_keys_beside_steps_of_any_kind(
    device: str, cuda_graph: bool | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lit_rlkv.rollout.decoder.resume_rows", lambda *args: None)
    model = prepare_backbone(build(tiny_config("qwen3")).to(device))
    with pytest.raises(ValueError, match="a row has lost its keys"):
        talk_through(model, spec_of("h2o"), Talk(delay_s=0.05), cuda_graph=cuda_graph)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["dense", "h2o", "snapkv"])
def test_conversations_of_captured_steps_are_those_of_plain_ones(policy: str):
    model = prepare_backbone(build(tiny_config("qwen3")).to("cuda"))
    captured, plain = (
        talk_through(model, spec_of(policy), Talk(), cuda_graph=is_graph) for is_graph in (True, False)
    )
    assert torch.equal(captured.input_ids, plain.input_ids)
    assert torch.equal(captured.evicted_at, plain.evicted_at)


def test_a_dense_cache_grows_while_rows_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lit_rlkv.rollout.decoder.FIRST_TOKENS", 4)
    model, talk = tiny_model("qwen3"), Talk(delay_s=0.03)
    rollout = talk_through(model, CacheSpec.dense(), talk)
    check_tokens(rollout, talk)
    assert gap(model, rollout) < TOLERANCE


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "falcon_h1"])
def test_states_of_rows_that_wait_are_kept(name: str):
    model, talk = prepare_backbone(test_hybrids.hybrid(name)), Talk(delay_s=0.03)
    rollout = talk_through(model, spec_of("h2o"), talk)
    check_tokens(rollout, talk)
    assert gap(model, rollout) < TOLERANCE


@pytest.mark.parametrize("policy", ["dense", "h2o"])
def test_windows_of_rows_that_wait_are_kept(policy: str):
    family = next(iter(test_sliding_windows.CASES))
    model, talk = prepare_backbone(test_sliding_windows.windowed(family)), Talk(delay_s=0.03)
    rollout = talk_through(model, spec_of(policy), talk)
    assert gap(model, rollout) < TOLERANCE


@pytest.mark.parametrize("policy", ["dense", "h2o", "snapkv"])
def test_a_row_that_waits_without_being_put_aside_is_caught(policy: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lit_rlkv.rollout.decoder.resume_rows", lambda *args: None)
    with pytest.raises(ValueError, match="a row has lost its keys"):
        talk_through(tiny_model("qwen3"), spec_of(policy), Talk(delay_s=0.05))


@pytest.mark.parametrize("policy", ["dense", "h2o", "rkv"])
@pytest.mark.parametrize("options", [{}, {"top_k": 20}])
def test_log_probs_and_gradients_are_those_of_an_own_forward(policy: str, options: dict[str, Any]):
    model, own_model = (deepcopy(tiny_model("qwen3")) for _ in range(2))
    rollout = talk_through(model, spec_of(policy), Talk(delay_s=0.02), **options)
    weight = torch.randn(rollout.input_ids.shape, generator=torch.Generator().manual_seed(1))
    replayed = replay_logps(model, rollout)
    (replayed * weight).sum().backward()
    own, _ = explicit.log_probs(own_model, rollout, 1.0)
    (own * weight).sum().backward()
    torch.testing.assert_close(own, rollout.rollout_logps, rtol=0, atol=TOLERANCE)
    wrong = explicit.gradient_errors(model, own_model)
    assert max(wrong.values()) <= 1e-3, wrong


def test_equal_answers_at_once_give_the_same_rollout():
    first, second = (talk_through(tiny_model("qwen3"), spec_of("random"), Talk()) for _ in range(2))
    assert torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.evicted_at, second.evicted_at)


def test_an_answer_without_room_ends_the_response():
    talk = Talk(max_turns=100)
    rollout = talk_through(tiny_model("qwen3"), spec_of("h2o"), talk, max_new_tokens=12)
    check_tokens(rollout, talk)
    assert (rollout.attention_mask[:, max(LENS) :].sum(dim=1) <= 12).all()


def test_the_last_turn_is_the_last_run_of_sampled_tokens():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0], [0, 1, 0, 1, 0, 1]]).bool()
    expected = torch.tensor([[0, 0, 0, 0, 1, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()
    assert torch.equal(last_turn(mask), expected)
