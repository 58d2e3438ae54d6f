from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlkv.kvcache import POLICIES, CacheSpec
from lit_rlkv.rollout import generate
from lit_rlkv.types import NEVER, Rollout
from tests.models_zoo import PAD, VOCAB, ragged_prompts, tiny_model

N_NEW = 20
LENS = (14, 9, 4, 1)
WIDTH = max(LENS)


def spec_of(policy: str) -> CacheSpec:
    return CacheSpec(policy=policy, budget=8, interval=3, sink=1, window=3)


def run(token_ids: Tensor | None = None, is_prompt: Tensor | None = None, **changes: Any) -> Rollout:
    if token_ids is None or is_prompt is None:
        token_ids, is_prompt = ragged_prompts(LENS)
    settings: dict[str, Any] = {
        "cache": spec_of("snapkv"),
        "max_new_tokens": N_NEW,
        "eos_token_id": None,
        "pad_token_id": PAD,
        "generator": torch.Generator().manual_seed(0),
    }
    return generate(tiny_model(), token_ids, is_prompt, **{**settings, **changes})


@cache
def unstopped(policy: str) -> Rollout:
    return run(cache=spec_of(policy), temperature=0.0)


@cache
def eos() -> int:
    """A token at which the greedy rows stop at different lengths, one of them not at all."""
    responses = unstopped("snapkv").token_ids[:, WIDTH:]
    for token in responses.unique().tolist():
        lengths = [row.index(token) + 1 if token in row else N_NEW for row in responses.tolist()]
        if len(set(lengths)) >= 3 and N_NEW in lengths and min(lengths) < N_NEW - 5:
            return int(token)
    raise AssertionError("no token of these rollouts stops rows at different lengths")


def equal(a: Rollout, b: Rollout) -> bool:
    names = ("token_ids", "is_token", "is_action", "sampler_logps", "death")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


def test_the_same_seed_gives_the_same_rollout_and_another_another():
    first, again, other = (run(generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert equal(first, again)
    assert not torch.equal(first.token_ids, other.token_ids)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_attention_masks_of_any_type_mean_the_same(dtype: torch.dtype):
    token_ids, is_prompt = ragged_prompts(LENS)
    assert equal(run(token_ids, is_prompt.to(dtype)), run())


def test_prompts_stand_first_and_every_column_after_them_is_an_action():
    rollout = run()
    token_ids, is_prompt = ragged_prompts(LENS)
    assert torch.equal(rollout.token_ids[:, :WIDTH], token_ids)
    assert torch.equal(rollout.is_token[:, :WIDTH], is_prompt)
    assert rollout.token_ids.shape == (len(LENS), WIDTH + N_NEW)
    assert not rollout.is_action[:, :WIDTH].any()
    assert rollout.is_action[:, WIDTH:].all()
    assert (rollout.sampler_logps[rollout.is_action] < 0).all()
    assert (rollout.sampler_logps[~rollout.is_action] == 0).all()


def test_greedy_actions_are_certain():
    assert (unstopped("snapkv").sampler_logps == 0).all()


def test_a_row_ends_with_its_end_of_sequence_token():
    rollout, full = run(eos_token_id=eos(), temperature=0.0), unstopped("snapkv")
    lengths = set()
    for row in range(len(LENS)):
        actions = rollout.token_ids[row][rollout.is_action[row]].tolist()
        assert actions == full.token_ids[row, WIDTH : WIDTH + len(actions)].tolist()
        assert eos() not in actions[:-1]
        assert actions[-1] == eos() or len(actions) == N_NEW
        assert (rollout.token_ids[row, WIDTH + len(actions) :] == PAD).all()
        assert not rollout.is_token[row, WIDTH + len(actions) :].any()
        lengths.add(len(actions))
    assert len(lengths) >= 3


def test_any_of_several_end_of_sequence_tokens_ends_a_row():
    responses = unstopped("snapkv").token_ids[:, WIDTH:].tolist()
    several = [row[4] for row in responses]
    rollout = run(eos_token_id=several, temperature=0.0)
    expected = [min(i for i, token in enumerate(row) if token in several) + 1 for row in responses]
    assert rollout.is_action.sum(dim=1).tolist() == expected
    assert equal(run(eos_token_id=[eos()], temperature=0.0), run(eos_token_id=eos(), temperature=0.0))


def test_columns_that_no_row_needs_are_cut():
    responses = unstopped("snapkv").token_ids[:, WIDTH:].tolist()
    several = [row[4] for row in responses]
    rollout = run(eos_token_id=several, temperature=0.0)
    assert (
        rollout.token_ids.shape[1] == rollout.death.shape[-1] == WIDTH + int(rollout.is_action.sum(1).max())
    )
    assert rollout.is_action[:, -1].any()


def test_nothing_dies_after_the_end_of_a_row():
    rollout, full = run(eos_token_id=eos(), temperature=0.0), unstopped("snapkv")
    for row in range(len(LENS)):
        # The query one column before the last action is the last that predicted anything.
        last_query = int(rollout.is_action[row].nonzero().max()) - 1
        death = rollout.death[row, :, :, : last_query + 2]
        assert (death[death != NEVER] <= last_query).all()
        expected = full.death[row, :, :, : last_query + 2]
        assert torch.equal(death, expected.masked_fill(expected > last_query, NEVER))
    assert (full.death[full.death != NEVER] > WIDTH + 10).any()


def test_padding_is_dead_from_the_start_on_both_sides():
    rollout = run(eos_token_id=eos(), temperature=0.0)
    assert (~rollout.is_token[:, WIDTH:]).any()
    is_dead_at_birth = (rollout.death == 0).all(dim=(1, 2))
    assert torch.equal(is_dead_at_birth, ~rollout.is_token)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"random"}))
def test_rows_do_not_depend_on_who_shares_the_batch(policy: str):
    token_ids, is_prompt = ragged_prompts(LENS)
    settings = {"cache": spec_of(policy), "temperature": 0.0, "eos_token_id": eos()}
    together = run(**settings)
    permutation = torch.tensor([2, 0, 3, 1])
    assert equal(run(token_ids[permutation], is_prompt[permutation], **settings), together.rows(permutation))
    alone, n = run(token_ids[1:2], is_prompt[1:2], **settings), int(together.is_token[1].nonzero().max()) + 1
    assert alone.token_ids.shape[1] == n
    assert torch.equal(alone.token_ids[0], together.token_ids[1, :n])
    assert torch.equal(alone.death[0], together.death[1, ..., :n])


def test_a_row_does_not_depend_on_how_far_it_is_padded():
    token_ids, is_prompt = ragged_prompts(LENS)
    bare = run(token_ids[1:2, 5:], is_prompt[1:2, 5:], temperature=0.0)
    padded = unstopped("snapkv")
    assert torch.equal(bare.token_ids[0], padded.token_ids[1, 5:])
    shifted = torch.where(bare.death == NEVER, NEVER, bare.death + 5)
    assert torch.equal(shifted[0], padded.death[1, ..., 5:])


def test_the_policies_evict_and_do_so_differently():
    tables = [unstopped(policy).death for policy in ("streaming", "h2o", "snapkv", "rkv", "tova", "knorm")]
    for table in tables:
        assert ((table > 0) & (table < NEVER)).float().mean() > 0.3
    assert not any(torch.equal(a, b) for i, a in enumerate(tables) for b in tables[:i])


def test_a_single_new_token_needs_no_decoding():
    rollout = run(max_new_tokens=1)
    assert rollout.token_ids.shape[1] == WIDTH + 1
    assert (rollout.death[rollout.is_token[:, None, None].expand_as(rollout.death)] == NEVER).all()


def test_no_gradient_is_recorded():
    assert not run().sampler_logps.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens=0 leaves nothing to sample; give at least 1"),
        ({"temperature": -0.5}, r"temperature=-0\.5 is negative; use 0 for greedy"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        run(**changes)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 1, 0]], "not left-padded; put padding first"),
        ([[1, 0, 1]], "not left-padded; put padding first"),
        ([[0, 0, 0], [1, 1, 1]], "a prompt is empty"),
        (
            [[1, 1]],
            r"attention_mask has shape \(1, 2\) but token_ids \(1, 3\); give one entry for each token",
        ),
    ],
)
def test_prompts_that_are_not_left_padded_are_refused(rows: list[list[int]], message: str):
    mask = torch.tensor(rows)
    with pytest.raises(ValueError, match=message):
        run(torch.ones(len(rows), 3, dtype=torch.long), mask)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_prompts_are_refused(shape: tuple[int, int]):
    with pytest.raises(ValueError, match=r"hold no prompt; give at least one token"):
        run(torch.zeros(shape, dtype=torch.long), torch.ones(shape))


def test_a_prompt_of_another_vocabulary_is_refused():
    token_ids, is_prompt = ragged_prompts()
    token_ids[0, -1] = VOCAB
    with pytest.raises(ValueError, match="a prompt holds token 64, but LlamaForCausalLM embeds 64 tokens"):
        generate(
            tiny_model(),
            token_ids,
            is_prompt,
            cache=CacheSpec.dense(),
            max_new_tokens=2,
            eos_token_id=None,
            pad_token_id=PAD,
        )


def test_tokens_stay_in_the_vocabulary():
    rollout = run()
    assert rollout.token_ids.min() >= 0
    assert rollout.token_ids.max() < VOCAB
