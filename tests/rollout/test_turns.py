"""Turns: responses that go on after an answer, waiting or not, are what was said and are replayed exactly."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from lit_rlkv.models import prepare_backbone, replay_logps
from lit_rlkv.rollout import Rollout
from lit_rlkv.rollout.turns import last_turn, turn_starts
from tests.fuzz import explicit
from tests.models_zoo import build, tiny_config, tiny_model
from tests.rollout.conversations import ENDS, Talk, talk_through
from tests.rollouts import LONG, TOLERANCE, gap
from tests.tiers import diagonal


def check_tokens(rollout: Rollout, talk: Talk) -> None:
    """After each prompt stand the turns as sampled and the answers as given, and nothing else."""
    for place in range(len(rollout.input_ids)):
        turns, given = talk.turns[place], talk.given.get(place, [])
        row, first = rollout.input_ids[place], max(LONG)
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


OPTIONS = [{"prefill_chunk": 3}, {"max_rows": 4}, {"max_rows": 2}, {"top_k": 20}, {"max_new_tokens": 21}]


@pytest.mark.parametrize(("policy", "options"), diagonal(["dense", "h2o", "snapkv"], OPTIONS))
def test_conversations_are_what_was_said_and_replayed_exactly(policy: str, options: dict[str, Any]):
    talk = Talk(delay_s=0.0 if "prefill_chunk" in options else 0.05)
    rollout = talk_through("qwen3", policy, talk, **options)
    check_tokens(rollout, talk)
    assert turn_starts(rollout.response_mask).sum(dim=1).max() > 1
    assert gap("qwen3", rollout) < TOLERANCE


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
    rollout = talk_through(model, policy, talk, max_rows=4, cuda_graph=cuda_graph)
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
        talk_through(model, "h2o", Talk(delay_s=0.05), cuda_graph=cuda_graph)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["dense", "h2o", "snapkv"])
def test_conversations_of_captured_steps_are_those_of_plain_ones(policy: str):
    model = prepare_backbone(build(tiny_config("qwen3")).to("cuda"))
    captured, plain = (talk_through(model, policy, Talk(), cuda_graph=is_graph) for is_graph in (True, False))
    assert torch.equal(captured.input_ids, plain.input_ids)
    assert torch.equal(captured.evicted_at, plain.evicted_at)


@pytest.mark.parametrize("policy", ["dense", "h2o", "rkv"])
@pytest.mark.parametrize("options", [{}, {"top_k": 20}])
def test_log_probs_and_gradients_are_those_of_an_own_forward(policy: str, options: dict[str, Any]):
    model, own_model = (deepcopy(tiny_model("qwen3")) for _ in range(2))
    rollout = talk_through(model, policy, Talk(delay_s=0.02), **options)
    weight = torch.randn(rollout.input_ids.shape, generator=torch.Generator().manual_seed(1))
    replayed = replay_logps(model, rollout)
    (replayed * weight).sum().backward()
    own, _ = explicit.log_probs(own_model, rollout, 1.0)
    (own * weight).sum().backward()
    torch.testing.assert_close(own, rollout.rollout_logps, rtol=0, atol=TOLERANCE)
    wrong = explicit.gradient_errors(model, own_model)
    assert max(wrong.values()) <= 1e-3, wrong


def test_equal_answers_at_once_give_the_same_rollout():
    first, second = (talk_through("qwen3", "random", Talk()) for _ in range(2))
    assert torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.evicted_at, second.evicted_at)


def test_an_answer_without_room_ends_the_response():
    talk = Talk(max_turns=100)
    rollout = talk_through("qwen3", "h2o", talk, max_new_tokens=12)
    check_tokens(rollout, talk)
    assert (rollout.attention_mask[:, max(LONG) :].sum(dim=1) <= 12).all()


def test_the_last_turn_is_the_last_run_of_sampled_tokens():
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0], [0, 1, 0, 1, 0, 1]]).bool()
    expected = torch.tensor([[0, 0, 0, 0, 1, 0], [0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()
    assert torch.equal(last_turn(mask), expected)
