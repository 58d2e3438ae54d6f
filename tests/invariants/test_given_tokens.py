"""Given tokens, in prompts and within responses: what the learner replays is what the sampler saw."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import JambaConfig

from lit_rlkv.kvcache import POLICIES
from lit_rlkv.models import prepare_backbone
from lit_rlkv.rollout.decoder import Decoder, DecodeSettings
from lit_rlkv.settings import Sampling
from lit_rlkv.types import NEVER, Rollout
from tests.models_zoo import FAMILIES, PAD, SIZE, VOCAB, build, ragged_prompts, tiny_model
from tests.rollouts import (
    LONG,
    N_GIVEN,
    SIZES,
    TOLERANCE,
    converse,
    died,
    gap,
    roll_out,
    spec_of,
)
from tests.tiers import diagonal, every_nth

FLOAT_ERROR = 1e-6
CHUNKS = (1, 3, 5, 9)
"""Up to three intervals; 5 and 9 divide no prompt."""


@cache
def rolled_out(policy: str, chunk: int) -> Rollout:
    return roll_out("qwen3", policy, LONG, prefill_chunk=chunk, max_new_tokens=10, eos_token_id=5)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("policy", ["dense", "h2o", "snapkv"])
def test_a_prompt_within_the_budget_may_be_split_anywhere(policy: str, chunk: int):
    spec = spec_of(policy, budget=100)
    whole, split = (roll_out("qwen3", spec, LONG, prefill_chunk=n) for n in (None, chunk))
    assert torch.equal(split.input_ids, whole.input_ids)
    assert torch.equal(split.evicted_at, whole.evicted_at)
    torch.testing.assert_close(split.rollout_logps, whole.rollout_logps, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("policy", "chunk"), diagonal(POLICIES, CHUNKS))
def test_a_prompt_in_chunks_is_replayed_exactly(policy: str, chunk: int):
    rollout = rolled_out(policy, chunk)
    assert gap("qwen3", rollout) < TOLERANCE
    assert gap("qwen3", rollout, shadow=False) > 100 * TOLERANCE


@pytest.mark.parametrize("family", every_nth(3, FAMILIES))
def test_every_family_reads_given_tokens(family: str):
    for policy in ("snapkv", "h2o"):
        assert gap(family, converse(family, policy, 4)) < TOLERANCE


def test_a_model_that_forgets_its_states_between_chunks_takes_prompts_in_one_piece():
    sizes = {"mamba_d_state": 4, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
    model = prepare_backbone(build(JambaConfig(**SIZE, **sizes, use_mamba_kernels=False)))
    assert gap(model, roll_out(model, lens=LONG)) < TOLERANCE
    with pytest.raises(ValueError, match="prefill_chunk"):
        roll_out(model, prefill_chunk=4)
    with pytest.raises(ValueError, match="no given tokens within responses"):
        converse(model, "snapkv", None)


def test_rows_without_room_or_that_ended_before_the_latest_step_are_not_fed():
    settings = DecodeSettings(N_GIVEN, torch.arange(VOCAB), PAD, Sampling())  # every token is an end
    decoder = Decoder(
        tiny_model("qwen3"), spec_of("h2o"), len(LONG), max(LONG), settings, None, cuda_graph=None
    )
    given, too_many = (torch.ones(1, n, dtype=torch.long) for n in (2, N_GIVEN))
    with torch.no_grad():
        decoder.prefill(range(len(LONG)), *ragged_prompts(LONG))
        with pytest.raises(ValueError, match="fewer tokens, or raise max_new_tokens"):
            decoder.feed([0], too_many, too_many.bool())
        decoder.feed([0], given, given.bool())
        decoder.step()
        with pytest.raises(ValueError, match="ended before the latest step"):
            decoder.feed([1], given, given.bool())


@pytest.mark.parametrize("policy", ["random", "h2o", "expected"])
def test_samples_of_a_prompt_share_its_chunks(policy: str):
    rollout = roll_out("qwen3", policy, LONG, prefill_chunk=4, num_return_sequences=2, max_rows=4)
    assert gap("qwen3", rollout) < TOLERANCE
    assert not torch.equal(rollout.input_ids[0], rollout.input_ids[1])
    of_prompt = rollout.evicted_at[..., : max(LONG)]
    before_end = of_prompt.where(of_prompt < max(LONG), NEVER)
    assert torch.equal(before_end[0::2], before_end[1::2])  # the chunks before the last were read once


def moved_in_prompt(rollout: Rollout, move: Callable[[Tensor], Tensor]) -> Rollout:
    """The rollout with other eviction times of the keys that died within the prompt."""
    is_moved = died(rollout) & (rollout.evicted_at < max(LONG))
    born = torch.arange(rollout.evicted_at.shape[-1])
    times = torch.maximum(move(rollout.evicted_at), born + 1).int()
    return rollout.with_record(evicted_at=torch.where(is_moved, times, rollout.evicted_at))


@pytest.mark.parametrize(("policy", "chunk"), diagonal(POLICIES, [3, 9]))
def test_ends_of_chunks_that_are_nearly_right_are_caught(policy: str, chunk: int):
    rollout = rolled_out(policy, chunk)
    floor = 100 * max(gap("qwen3", rollout), FLOAT_ERROR)
    for by in (1, -1, -chunk):  # the last: evicted where its chunk begins
        assert gap("qwen3", moved_in_prompt(rollout, lambda at, by=by: at + by)) > floor


@pytest.mark.parametrize("chunk", CHUNKS)
def test_keys_of_a_prompt_die_at_the_ends_of_chunks_down_to_the_budget(chunk: int):
    rollout = rolled_out("snapkv", chunk)
    for row, length in enumerate(LONG):
        first = max(LONG) - length
        for end in range(max(LONG) - chunk * ((length - 1) // chunk), max(LONG) + 1, chunk):
            alive = (rollout.evicted_at[row, ..., first:end] > end).sum(dim=-1)
            assert (alive == min(end - first, SIZES["budget"])).all()
        times = rollout.evicted_at[row][died(rollout)[row]]
        within = times[times < max(LONG)]
        assert ((max(LONG) - within) % chunk == 0).all()


def test_experts_and_sampling_masks_of_given_tokens_are_recorded_and_left_out():
    rollout = converse("qwen3_moe", "h2o", 4, top_k=5, record_routing=True)
    assert gap("qwen3_moe", rollout) < TOLERANCE
    assert rollout.record.sampling_masks is not None
    assert torch.equal(rollout.record.sampling_masks.counts > 0, rollout.response_mask)
    assert rollout.record.expert_ids is not None
    is_read = rollout.attention_mask & torch.nn.functional.pad(rollout.attention_mask[:, 1:], (0, 1))
    assert torch.equal((rollout.record.expert_ids >= 0).all(dim=(1, 2)), is_read)


def test_a_chunk_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="prefill_chunk"):
        roll_out(prefill_chunk=0)
