import re
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_rlkv.kvcache import POLICIES
from lit_rlkv.rollout import generate
from lit_rlkv.rollout.decode_loop import decode_all, steps_to_check
from lit_rlkv.rollout.decoder import Decoder
from lit_rlkv.types import NEVER, Rollout
from tests.models_zoo import PAD, VOCAB, ragged_prompts, tiny_model
from tests.rollouts import LENS, roll_out, same, spec_of
from tests.tiers import slow

N_NEW = 20
WIDTH = max(LENS)


def run(input_ids: Tensor | None = None, is_prompt: Tensor | None = None, **changes: Any) -> Rollout:
    settings: dict[str, Any] = {"max_new_tokens": N_NEW} | changes
    if input_ids is None or is_prompt is None:
        return roll_out(**settings)
    return generate(
        tiny_model(),
        input_ids,
        is_prompt,
        **{"cache": spec_of("snapkv"), "eos_token_id": None, "pad_token_id": PAD} | settings,
    )


@cache
def unstopped(policy: str) -> Rollout:
    return run(cache=spec_of(policy), temperature=0.0)


@cache
def eos() -> int:
    """A token at which the greedy rows stop at different lengths, one of them not at all."""
    responses = unstopped("snapkv").input_ids[:, WIDTH:]
    for token in responses.unique().tolist():
        lengths = [row.index(token) + 1 if token in row else N_NEW for row in responses.tolist()]
        if len(set(lengths)) >= 3 and N_NEW in lengths and min(lengths) < N_NEW - 5:
            return int(token)
    raise AssertionError("no token of these rollouts stops rows at different lengths")


def test_without_a_pad_token_responses_are_padded_by_the_end_token():
    found = run(eos_token_id=[eos(), PAD], pad_token_id=None, temperature=0.0)
    known = run(eos_token_id=[eos(), PAD], pad_token_id=eos(), temperature=0.0)
    assert same(found, known)
    assert bool((found.input_ids[:, WIDTH:][~found.attention_mask[:, WIDTH:].bool()] == eos()).all())
    with pytest.raises(ValueError, match="pad_token_id must be given where there is no eos_token_id"):
        run(pad_token_id=None)


def test_the_same_seed_gives_the_same_rollout_and_another_another():
    first, again, other = (run(generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert same(first, again)
    assert not torch.equal(first.input_ids, other.input_ids)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_attention_masks_of_any_type_mean_the_same(dtype: torch.dtype):
    input_ids, is_prompt = ragged_prompts(LENS)
    assert same(run(input_ids, is_prompt.to(dtype)), run())


def test_prompts_come_first_and_every_later_column_is_a_response_token():
    rollout = run()
    input_ids, is_prompt = ragged_prompts(LENS)
    assert torch.equal(rollout.input_ids[:, :WIDTH], input_ids)
    assert torch.equal(rollout.attention_mask[:, :WIDTH], is_prompt)
    assert rollout.input_ids.shape == (len(LENS), WIDTH + N_NEW)
    assert not rollout.response_mask[:, :WIDTH].any()
    assert rollout.response_mask[:, WIDTH:].all()
    assert (rollout.rollout_logps[rollout.response_mask] < 0).all()
    assert (rollout.rollout_logps[~rollout.response_mask] == 0).all()


def test_greedy_tokens_have_log_prob_zero():
    assert (unstopped("snapkv").rollout_logps == 0).all()


def test_a_row_ends_with_its_end_of_sequence_token():
    rollout, full = run(eos_token_id=eos(), temperature=0.0), unstopped("snapkv")
    lengths = set()
    for row in range(len(LENS)):
        actions = rollout.input_ids[row][rollout.response_mask[row]].tolist()
        assert actions == full.input_ids[row, WIDTH : WIDTH + len(actions)].tolist()
        assert eos() not in actions[:-1]
        assert actions[-1] == eos() or len(actions) == N_NEW
        assert (rollout.input_ids[row, WIDTH + len(actions) :] == PAD).all()
        assert not rollout.attention_mask[row, WIDTH + len(actions) :].any()
        lengths.add(len(actions))
    assert len(lengths) >= 3


def test_any_of_several_end_of_sequence_tokens_ends_a_row():
    responses = unstopped("snapkv").input_ids[:, WIDTH:].tolist()
    several = [row[4] for row in responses]
    rollout = run(eos_token_id=several, temperature=0.0)
    expected = [min(i for i, token in enumerate(row) if token in several) + 1 for row in responses]
    assert rollout.response_mask.sum(dim=1).tolist() == expected
    expected_one = run(eos_token_id=eos(), temperature=0.0)
    for one in ([eos()], torch.tensor(eos()), torch.tensor([eos()]), np.int64(eos()), np.array([eos()])):
        assert same(run(eos_token_id=one, temperature=0.0), expected_one)
    for wrong in (2.0, True, "2", torch.tensor([2.5])):
        with pytest.raises(ValueError, match="eos_token_id must be"):
            run(eos_token_id=wrong)
    with pytest.raises(ValueError, match="got -1; None never ends a response"):
        run(eos_token_id=-1)


def test_columns_that_no_row_needs_are_cut():
    responses = unstopped("snapkv").input_ids[:, WIDTH:].tolist()
    several = [row[4] for row in responses]
    rollout = run(eos_token_id=several, temperature=0.0)
    assert (
        rollout.input_ids.shape[1]
        == rollout.evicted_at.shape[-1]
        == WIDTH + int(rollout.response_mask.sum(1).max())
    )
    assert rollout.response_mask[:, -1].any()


def test_nothing_is_evicted_after_the_end_of_a_row():
    rollout, full = run(eos_token_id=eos(), temperature=0.0), unstopped("snapkv")
    for row in range(len(LENS)):
        # The query one column before the last action is the last that predicted anything.
        last_query = int(rollout.response_mask[row].nonzero().max()) - 1
        evicted_at = rollout.evicted_at[row, :, :, : last_query + 2]
        assert (evicted_at[evicted_at != NEVER] <= last_query).all()
        expected = full.evicted_at[row, :, :, : last_query + 2]
        assert torch.equal(evicted_at, expected.masked_fill(expected > last_query, NEVER))
    assert (full.evicted_at[full.evicted_at != NEVER] > WIDTH + 10).any()


def test_padding_is_evicted_at_0_on_both_sides():
    rollout = run(eos_token_id=eos(), temperature=0.0)
    assert (~rollout.attention_mask[:, WIDTH:]).any()
    is_dead_at_birth = (rollout.evicted_at == 0).all(dim=(1, 2))
    assert torch.equal(is_dead_at_birth, ~rollout.attention_mask)


@pytest.mark.parametrize(
    "policy",
    [p if p in ("h2o", "snapkv", "keydiff") else slow(p) for p in sorted(POLICIES) if not POLICIES[p].draws],
)
def test_rows_do_not_depend_on_who_shares_the_batch(policy: str):
    input_ids, is_prompt = ragged_prompts(LENS)
    settings = {"cache": spec_of(policy), "temperature": 0.0, "eos_token_id": eos()}
    together = run(**settings)
    permutation = torch.tensor([2, 0, 3, 1])
    assert same(run(input_ids[permutation], is_prompt[permutation], **settings), together.rows(permutation))
    alone, n = (
        run(input_ids[1:2], is_prompt[1:2], **settings),
        int(together.attention_mask[1].nonzero().max()) + 1,
    )
    assert alone.input_ids.shape[1] == n
    assert torch.equal(alone.input_ids[0], together.input_ids[1, :n])
    assert torch.equal(alone.evicted_at[0], together.evicted_at[1, ..., :n])


def test_a_row_does_not_depend_on_how_far_it_is_padded():
    input_ids, is_prompt = ragged_prompts(LENS)
    bare = run(input_ids[1:2, 5:], is_prompt[1:2, 5:], temperature=0.0)
    padded = unstopped("snapkv")
    assert torch.equal(bare.input_ids[0], padded.input_ids[1, 5:])
    shifted = torch.where(bare.evicted_at == NEVER, NEVER, bare.evicted_at + 5)
    assert torch.equal(shifted[0], padded.evicted_at[1, ..., 5:])


def check_rarely(check_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for finished rows after this many steps, as on a GPU."""

    def rarely(*arguments: Any) -> Any:
        return decode_all(*arguments[:4], check_every, *arguments[5:])

    monkeypatch.setattr(sys.modules[generate.__module__], "decode_all", rarely)


@pytest.mark.parametrize("check_every", [2, 5, 16])
def test_how_often_finished_rows_are_looked_for_changes_no_row(
    check_every: int, monkeypatch: pytest.MonkeyPatch
):
    settings: dict[str, Any] = {"temperature": 0.0, "eos_token_id": eos(), "max_rows": 2}
    at_once = run(**settings)

    check_rarely(check_every, monkeypatch)
    assert same(run(**settings), at_once)


@pytest.mark.parametrize(
    ("interval", "steps"),
    [(None, [16, 16, 16]), (5, [15, 15, 15]), (16, [16, 16, 16]), (17, [9, 8, 9]), (40, [14, 14, 12])],
)
def test_checks_divide_an_interval_into_few_parts(interval: int | None, steps: list[int]):
    n_done = [sum(steps[:i]) for i in range(3)]
    assert [steps_to_check(n, 16, interval) for n in n_done] == steps


def test_no_gradient_is_recorded():
    assert not run().rollout_logps.requires_grad


def mask(*rows: list[int]) -> tuple[Tensor, Tensor]:
    return torch.ones(len(rows), 3, dtype=torch.long), torch.tensor(rows)


REFUSED: list[tuple[dict[str, Any], tuple[Tensor, ...], str]] = [
    ({"max_new_tokens": 0}, (), r"max_new_tokens must be a whole number of at least 1, got 0"),
    ({"temperature": -0.5}, (), r"temperature must be .*, got -0\.5 \(.*; 0: greedy\)"),
    ({}, mask([1, 1, 0]), "not left-padded; put padding first"),
    ({}, mask([1, 0, 1]), "not left-padded; put padding first"),
    ({}, mask([0, 0, 0], [1, 1, 1]), "a prompt is empty"),
    ({}, mask([1, 1]), r"attention_mask must have the shape of input_ids \(1, 3\), got \(1, 2\)"),
    (
        {},
        (torch.ones(1, 3, dtype=torch.int32), torch.ones(1, 3)),
        r"a torch.long tensor \[batch, prompt\], got torch.int32",
    ),
    (
        {},
        (torch.ones(0, 3, dtype=torch.long), torch.ones(0, 3)),
        "at least one prompt of one token",
    ),
    (
        {},
        (torch.ones(2, 0, dtype=torch.long), torch.ones(2, 0)),
        "at least one prompt of one token",
    ),
    (
        {},
        (torch.full((1, 3), VOCAB), torch.ones(1, 3)),
        "a prompt holds token 64, but LlamaForCausalLM has 64 embeddings",
    ),
]


@pytest.mark.parametrize(("changes", "prompts", "says"), REFUSED)
def test_what_cannot_be_sampled_is_refused(changes: dict[str, Any], prompts: tuple[Tensor, ...], says: str):
    with pytest.raises(ValueError, match=says):
        run(*prompts, **changes)


@pytest.mark.parametrize("max_rows", [None, 4, 3])
def test_progress_counts_each_token_and_a_response_that_ends_early_in_full(max_rows: int | None):
    reports: list[int] = []
    settings: dict[str, Any] = {"temperature": 0.0, "num_return_sequences": 2, "max_rows": max_rows}
    run(**settings, eos_token_id=eos(), on_progress=reports.append)
    assert sum(reports) == 2 * len(LENS) * N_NEW
    assert min(reports) >= 0
    assert len(reports) >= N_NEW - 1  # one row is not stopped, and each of its steps is reported
    assert reports[0] >= 2 * min(2, len(LENS))  # the prefill and the first step


def test_progress_of_a_rollout_is_even_if_no_response_ends_early():
    reports: list[int] = []
    run(on_progress=reports.append)
    assert reports == [2 * len(LENS)] + [len(LENS)] * (N_NEW - 2)


def handed_over(**settings: Any) -> tuple[Rollout, dict[int, tuple[Tensor, Tensor]]]:
    """Return a rollout, and by row the tokens and the response mask that `on_finished` was given."""
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def on_finished(rows: list[int], input_ids: Tensor, response_mask: Tensor) -> None:
        assert found.keys().isdisjoint(rows)
        found.update(zip(rows, zip(input_ids, response_mask, strict=True), strict=True))

    return run(temperature=0.0, eos_token_id=eos(), on_finished=on_finished, **settings), found


@pytest.mark.parametrize("settings", [{}, {"max_rows": 2}, {"max_rows": 4, "num_return_sequences": 2}])
def test_each_ended_response_is_given_once_with_the_tokens_of_its_row(settings: dict[str, Any]):
    rollout, found = handed_over(**settings)
    assert sorted(found) == list(range(len(rollout.input_ids)))
    for row, (input_ids, response_mask) in found.items():
        assert len(input_ids) == len(response_mask) == WIDTH + N_NEW
        expected = rollout.input_ids[row][rollout.response_mask[row]]
        assert torch.equal(input_ids[response_mask], expected)
    n_tokens = rollout.response_mask.sum(dim=1)
    order = n_tokens[list(found)].tolist()
    if not settings:  # all rows start together
        assert order == sorted(order) != n_tokens.tolist()


@pytest.mark.parametrize("max_rows", [None, 2])
def test_ended_responses_are_read_where_the_host_waits_anyway_and_given_while_steps_are_queued(
    max_rows: int | None, monkeypatch: pytest.MonkeyPatch
):
    events: list[str] = []

    def recorded(owner: type, method: str, event: str) -> None:
        original = getattr(owner, method)

        def call(*arguments: Any) -> Any:
            events.append(event)
            return original(*arguments)

        monkeypatch.setattr(owner, method, call)

    recorded(Decoder, "prefill", "P")
    recorded(Decoder, "step", "s")
    recorded(Decoder, "read_tokens", "r")
    check_rarely(3, monkeypatch)
    settings = {"temperature": 0.0, "eos_token_id": eos(), "max_rows": max_rows, "max_new_tokens": 19}
    plain, without = run(**settings), "".join(events)
    events.clear()
    watched = run(**settings, on_finished=lambda *_: events.append("g"))
    order = "".join(events)
    assert same(watched, plain)
    assert without == order.replace("r", "").replace("g", "")
    assert order.count("r") == order.count("g") >= 2
    # 18 steps with a check after every third. What was read then is given after three more, or at the end.
    assert re.fullmatch("(?:P?sssg?r?)+g", order) is not None


@pytest.mark.parametrize("options", [{}, {"max_rows": 3}])
def test_rows_that_are_copied_one_by_one_are_the_same(options, monkeypatch):
    options = {"top_k": 5, "eos_token_id": [3, 5, 11, 17], **options}
    expected = roll_out("llama", "h2o", **options)
    monkeypatch.setattr("lit_rlkv.rollout.decode_loop.READ_AT_ONCE", 1)
    found = roll_out("llama", "h2o", **options)
    assert len(set(found.response_mask.sum(dim=1).tolist())) > 1
    assert all(map(torch.equal, found.tensors(), expected.tensors()))
