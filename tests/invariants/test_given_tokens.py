"""Given tokens, in prompts and within responses: what the learner replays is what the sampler saw."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import JambaConfig, PreTrainedModel

from lit_rlkv.kvcache import POLICIES, CacheSpec, SlotCache
from lit_rlkv.models import prepare_backbone, replay_logps
from lit_rlkv.rollout import generate
from lit_rlkv.rollout.decoder import Decoder, DecodeSettings
from lit_rlkv.rollout.generate import as_rollout
from lit_rlkv.settings import Sampling
from lit_rlkv.types import NEVER, Rollout
from tests.models import test_hybrids, test_sliding_windows
from tests.models_zoo import FAMILIES, PAD, SIZE, VOCAB, build, ragged_prompts, tiny_model
from tests.rollout.recorded import RecordedRunner
from tests.tiers import diagonal, every_nth, short_tier

TOLERANCE = 1e-4
FLOAT_ERROR = 1e-6
SPEC = {"budget": 8, "interval": 3, "sink": 1, "window": 3}
LENS = (31, 22, 9, 1)
N_NEW = 64
CHUNKS = (1, 3, 5, 9)
"""Up to three intervals; 5 and 9 divide no prompt."""


def spec_of(policy: str, **changes: int) -> CacheSpec:
    return CacheSpec.dense() if policy == "dense" else CacheSpec(policy=policy, **SPEC | changes)


def roll_out(model: PreTrainedModel, spec: CacheSpec, chunk: int | None, **options: Any) -> Rollout:
    settings: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": 5, "pad_token_id": PAD} | options
    generator = torch.Generator().manual_seed(0)
    return generate(
        model, *ragged_prompts(LENS), cache=spec, prefill_chunk=chunk, generator=generator, **settings
    )


def converse(
    model: PreTrainedModel, spec: CacheSpec, chunk: int | None, top_k: int | None = None, **options: Any
) -> Rollout:
    """Four tokens of a response, then given ones of another length in each row, and so on."""
    input_ids, is_prompt = ragged_prompts(LENS)
    n_rows, generator = len(LENS), torch.Generator().manual_seed(0)
    settings = DecodeSettings(N_NEW, torch.tensor([], dtype=torch.long), PAD, Sampling(top_k=top_k))
    options = {"cuda_graph": None, "prefill_chunk": chunk} | options
    decoder = Decoder(model, spec, n_rows, max(LENS), settings, generator, **options)
    with torch.no_grad():
        decoder.prefill(range(n_rows), input_ids, is_prompt)
        for turn in range(3):
            for _ in range(4):
                decoder.step()
            rows = [row for row in range(n_rows) if (row + turn) % 3 != 0]
            n_given = 1 + torch.tensor([5 * row + 7 * turn for row in rows]) % 11
            is_token = torch.arange(11) >= 11 - n_given[:, None]
            tokens = torch.randint(1, VOCAB, is_token.shape, generator=generator)
            decoder.feed(rows, tokens.masked_fill(~is_token, PAD), is_token)
        for _ in range(4):
            decoder.step()
        too_many = torch.ones(1, N_NEW, dtype=torch.long)
        with pytest.raises(ValueError, match="fewer tokens, or raise max_new_tokens"):
            decoder.feed([0], too_many, too_many.bool())
    return as_rollout(decoder, decoder.read_rows(range(n_rows)), is_prompt)


def gap(model: PreTrainedModel, rollout: Rollout, *, shadow: bool = True) -> float:
    with torch.no_grad():
        return float((replay_logps(model, rollout, shadow=shadow) - rollout.rollout_logps).abs().max())


@cache
def rolled_out(policy: str, chunk: int) -> Rollout:
    return roll_out(tiny_model("qwen3"), spec_of(policy), chunk)


@cache
def conversation(policy: str, chunk: int | None) -> Rollout:
    return converse(tiny_model("qwen3"), spec_of(policy), chunk)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("policy", ["dense", "h2o", "snapkv"])
def test_a_prompt_within_the_budget_may_be_split_anywhere(policy: str, chunk: int):
    model, spec = tiny_model("qwen3"), spec_of(policy, budget=100)
    whole, split = roll_out(model, spec, None), roll_out(model, spec, chunk)
    assert torch.equal(split.input_ids, whole.input_ids)
    assert torch.equal(split.evicted_at, whole.evicted_at)
    torch.testing.assert_close(split.rollout_logps, whole.rollout_logps, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("policy", "chunk"), diagonal(POLICIES, CHUNKS))
def test_a_prompt_in_chunks_is_replayed_exactly(policy: str, chunk: int):
    model, rollout = tiny_model("qwen3"), rolled_out(policy, chunk)
    assert gap(model, rollout) < TOLERANCE
    assert gap(model, rollout, shadow=False) > 100 * TOLERANCE


@pytest.mark.parametrize(("policy", "chunk"), diagonal(["dense", *POLICIES], [None, 3, 7]))
def test_given_tokens_within_responses_are_replayed_exactly(policy: str, chunk: int | None):
    model, rollout = tiny_model("qwen3"), conversation(policy, chunk)
    is_begin = rollout.response_mask[:, 1:] & ~rollout.response_mask[:, :-1]
    assert sorted(is_begin.sum(dim=1).tolist()) == [3, 3, 3, 3]
    assert gap(model, rollout) < TOLERANCE


@pytest.mark.parametrize("family", every_nth(3, FAMILIES))
def test_every_family_reads_given_tokens(family: str):
    model = tiny_model(family)
    for policy in ("snapkv", "h2o"):
        assert gap(model, converse(model, spec_of(policy), 4)) < TOLERANCE


@pytest.mark.parametrize(("policy", "family"), diagonal(["dense", "h2o"], test_sliding_windows.CASES))
def test_windows_pass_over_given_tokens(family: str, policy: str):
    model = prepare_backbone(test_sliding_windows.windowed(family))
    for chunk in (2, 6, 13):
        assert gap(model, converse(model, spec_of(policy), chunk)) < TOLERANCE
    # A refilled row's first chunk does not begin at the first column.
    assert gap(model, roll_out(model, spec_of(policy), 9, max_rows=2)) < TOLERANCE


@pytest.mark.parametrize("name", short_tier(test_hybrids.CONFIGS, ["lfm2", "qwen3_next"]))
def test_states_pass_over_given_tokens(name: str):
    model = prepare_backbone(test_hybrids.hybrid(name))
    for chunk in (1, 6, None):
        assert gap(model, converse(model, spec_of("snapkv"), chunk)) < TOLERANCE


def test_a_model_that_forgets_its_states_between_chunks_takes_prompts_in_one_piece():
    sizes = {"mamba_d_state": 4, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
    model = prepare_backbone(build(JambaConfig(**SIZE, **sizes, use_mamba_kernels=False)))
    assert gap(model, roll_out(model, spec_of("snapkv"), None)) < TOLERANCE
    with pytest.raises(ValueError, match="prefill_chunk"):
        roll_out(model, spec_of("snapkv"), 4)
    with pytest.raises(ValueError, match="no given tokens within responses"):
        converse(model, spec_of("snapkv"), None)


def test_a_row_that_ended_before_the_latest_step_is_not_fed():
    model = tiny_model("qwen3")
    settings = DecodeSettings(N_NEW, torch.arange(VOCAB), PAD, Sampling())  # every token is an end
    decoder = Decoder(model, spec_of("h2o"), len(LENS), max(LENS), settings, None, cuda_graph=None)
    given = torch.ones(1, 2, dtype=torch.long)
    with torch.no_grad():
        decoder.prefill(range(len(LENS)), *ragged_prompts(LENS))
        decoder.feed([0], given, given.bool())
        decoder.step()
        with pytest.raises(ValueError, match="ended before the latest step"):
            decoder.feed([1], given, given.bool())


@pytest.mark.parametrize("policy", ["random", "h2o", "expected"])
@pytest.mark.parametrize("options", [{"max_rows": 4}, {"max_rows": 2, "num_return_sequences": 2}])
def test_refilled_rows_and_shared_prompts_are_replayed_exactly(policy: str, options: dict[str, int]):
    model = tiny_model("qwen3")
    rollout = roll_out(model, spec_of(policy), 4, **{"num_return_sequences": 2} | options)
    assert gap(model, rollout) < TOLERANCE
    assert not torch.equal(rollout.input_ids[0], rollout.input_ids[1])
    of_prompt = rollout.evicted_at[..., : max(LENS)]
    before_end = of_prompt.where(of_prompt < max(LENS), NEVER)
    assert torch.equal(before_end[0::2], before_end[1::2])  # the chunks before the last were read once


def died(rollout: Rollout) -> Tensor:
    return (rollout.evicted_at > 0) & (rollout.evicted_at < NEVER)


def moved(rollout: Rollout, move: Any) -> Rollout:
    """The rollout with other eviction times of the keys that died within the prompt."""
    is_moved = died(rollout) & (rollout.evicted_at < max(LENS))
    born = torch.arange(rollout.evicted_at.shape[-1])
    times = torch.maximum(move(rollout.evicted_at), born + 1).int()
    return rollout.with_record(evicted_at=torch.where(is_moved, times, rollout.evicted_at))


@pytest.mark.parametrize(("policy", "chunk"), diagonal(POLICIES, [3, 9]))
def test_ends_of_chunks_that_are_nearly_right_are_caught(policy: str, chunk: int):
    model, rollout = tiny_model("qwen3"), rolled_out(policy, chunk)
    floor = 100 * max(gap(model, rollout), FLOAT_ERROR)
    assert gap(model, moved(rollout, lambda at: at + 1)) > floor
    assert gap(model, moved(rollout, lambda at: at - 1)) > floor
    assert gap(model, moved(rollout, lambda at: at - chunk)) > floor  # evicted where its chunk begins


@pytest.mark.parametrize("chunk", CHUNKS)
def test_keys_of_a_prompt_die_at_the_ends_of_chunks_down_to_the_budget(chunk: int):
    rollout = rolled_out("snapkv", chunk)
    for row, length in enumerate(LENS):
        first = max(LENS) - length
        for end in range(max(LENS) - chunk * ((length - 1) // chunk), max(LENS) + 1, chunk):
            alive = (rollout.evicted_at[row, ..., first:end] > end).sum(dim=-1)
            assert (alive == min(end - first, SPEC["budget"])).all()
        times = rollout.evicted_at[row][died(rollout)[row]]
        within = times[times < max(LENS)]
        assert ((max(LENS) - within) % chunk == 0).all()


def same(a: Rollout, b: Rollout) -> bool:
    names = ("input_ids", "attention_mask", "response_mask", "rollout_logps", "evicted_at")
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in names)


@pytest.mark.parametrize("policy", ["dense", "h2o", "snapkv"])
def test_steps_replayed_without_their_python_go_on_after_a_feed(policy: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SlotCache, "n_filled", None)  # a graph reads empty slots, too
    model, spec = tiny_model("qwen3"), spec_of(policy)
    plain = converse(model, spec, 4)
    monkeypatch.setattr("lit_rlkv.rollout.decoder.CudaGraphRunner", RecordedRunner)
    before = RecordedRunner.n_replays
    assert same(converse(model, spec, 4), plain)
    assert RecordedRunner.n_replays > before + 5


def test_a_dense_cache_grows_for_given_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lit_rlkv.rollout.decoder.FIRST_TOKENS", 5)
    model = tiny_model("qwen3")
    rollout = converse(model, spec_of("dense"), 4)
    assert gap(model, rollout) < TOLERANCE
    assert torch.equal(rollout.input_ids, conversation("dense", 7).input_ids)


def test_experts_and_sampling_masks_of_given_tokens_are_recorded_and_left_out():
    model = tiny_model("qwen3_moe")
    options = {"top_k": 5, "record_routing": True}
    rollout = converse(model, spec_of("h2o"), 4, **options)
    assert gap(model, rollout) < TOLERANCE
    assert rollout.record.sampling_masks is not None
    assert torch.equal(rollout.record.sampling_masks.counts > 0, rollout.response_mask)
    assert rollout.record.expert_ids is not None
    is_read = rollout.attention_mask & torch.nn.functional.pad(rollout.attention_mask[:, 1:], (0, 1))
    assert torch.equal((rollout.record.expert_ids >= 0).all(dim=(1, 2)), is_read)


def test_a_chunk_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="prefill_chunk"):
        roll_out(tiny_model("qwen3"), spec_of("h2o"), 0)
