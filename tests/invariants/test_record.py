"""However rows come and go, the learner that replays the record computes what the sampler did.

Each cache, kind of layer and part of the record meets each way in which rows are sampled, and each case has
its control: a record that is nearly right.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lit_rlkv.experience.sample import joined, widened
from lit_rlkv.kernels.quantization import KV_DTYPES
from lit_rlkv.kvcache import POLICIES, CacheSpec, SlotCache
from lit_rlkv.models import prepare_backbone, replay_logps
from lit_rlkv.models.packing import passes, unpacked
from lit_rlkv.types import Rollout
from tests.models import test_hybrids, test_sliding_windows
from tests.models_zoo import MOE_FAMILIES, PAD, build, tiny_config, tiny_model
from tests.rollout.conversations import Talk, talk_through
from tests.rollout.recorded import RecordedRunner
from tests.rollouts import LONG, TOLERANCE, converse, died, gap, moved, roll_out, spec_of
from tests.tiers import diagonal, short_tier

CAUGHT = 1e-3
"""Gap of a record that is nearly right, at least, in nats."""
ENDS = [3, 5, 11, 17]
"""End tokens, so that responses differ in length."""


def earlier(rollout: Rollout) -> Rollout:
    """Evictions a column earlier; where windows rule, later ones change nothing."""
    after_birth = torch.arange(rollout.input_ids.shape[1]) + 1
    early = torch.maximum(rollout.evicted_at - 1, after_birth).int()
    return rollout.with_record(evicted_at=early.where(died(rollout), rollout.evicted_at))


def without_sets(rollout: Rollout) -> Rollout:
    return rollout.with_record(sampling_masks=None)


def codes_of_another_key(rollout: Rollout) -> Rollout:
    codes = rollout.record.codes
    return rollout.with_record(codes=replace(codes, record=codes.record.roll(1, dims=-1)))


def experts_of_another_token(rollout: Rollout) -> Rollout:
    return rollout.with_record(expert_ids=rollout.record.expert_ids.roll(1, dims=-1))


@dataclass(frozen=True)
class Subject:
    """A model and a cache to sample from, the recorded parts, and a record that is nearly right."""

    cache: CacheSpec
    model: Callable[[], PreTrainedModel] = lambda: tiny_model("qwen3")
    options: dict[str, Any] = field(default_factory=dict)
    wrong: Callable[[Rollout], Rollout] | None = moved

    @cache  # noqa: B019  # of the few subjects of this file
    def __call__(self) -> PreTrainedModel:
        return self.model()

    def __hash__(self) -> int:
        return id(self)


def prepared(make: Callable[[], PreTrainedModel]) -> Callable[[], PreTrainedModel]:
    return lambda: prepare_backbone(make())


def in_double() -> PreTrainedModel:
    """A model in which no float error moves a number to another code."""
    return copy.deepcopy(tiny_model("qwen3")).double()


def experts_in_double() -> PreTrainedModel:
    model = build(tiny_config("mixtral"))
    model.set_experts_implementation("eager")  # the default has no double precision
    return prepare_backbone(model.double())


EVERYTHING = {"top_k": 9, "record_routing": True}
SUBJECTS = {
    **{policy: Subject(spec_of(policy).for_rollouts) for policy in POLICIES},
    "dense": Subject(spec_of("dense"), wrong=None),
    "a protected prompt": Subject(spec_of("h2o", protect_prompt=True)),
    "a budget of each layer": Subject(spec_of("snapkv", budget_profile=(13, 5, 6))),
    **{
        f"windows of {name}": Subject(
            spec_of("h2o"), prepared(partial(test_sliding_windows.windowed, name)), wrong=earlier
        )
        for name in test_sliding_windows.CASES
    },
    **{
        f"states of {name}": Subject(spec_of("snapkv"), prepared(partial(test_hybrids.hybrid, name)))
        for name in test_hybrids.CONFIGS
    },
    "windows of a dense cache": Subject(
        spec_of("dense"), prepared(partial(test_sliding_windows.windowed, "gemma3")), wrong=earlier
    ),
    "states of a dense cache": Subject(
        spec_of("dense"), prepared(partial(test_hybrids.hybrid, "lfm2")), wrong=None
    ),
    "sets as ids": Subject(spec_of("snapkv"), options={"top_k": 6}, wrong=without_sets),
    "sets as bits": Subject(spec_of("knorm"), options={"top_p": 0.7}, wrong=without_sets),
    "sets of a dense cache": Subject(spec_of("dense"), options={"top_k": 6}, wrong=without_sets),
    **{
        f"{dtype} codes": Subject(spec_of("h2o", dtype=dtype), in_double, wrong=codes_of_another_key)
        for dtype in KV_DTYPES
    },
    **{
        f"experts of {family}": Subject(
            spec_of("snapkv"), partial(tiny_model, family), {"record_routing": True}, experts_of_another_token
        )
        for family in MOE_FAMILIES
    },
    "all parts": Subject(spec_of("tova", dtype="int8"), experts_in_double, EVERYTHING, codes_of_another_key),
    "all parts, dense": Subject(
        spec_of("dense", dtype="fp8"), experts_in_double, EVERYTHING, experts_of_another_token
    ),
}
Way = Callable[..., Rollout]
WAYS: dict[str, Way] = {
    "at once": roll_out,
    "samples of a prompt": partial(roll_out, num_return_sequences=2, eos_token_id=ENDS),
    "rows taken over": partial(roll_out, num_return_sequences=3, max_rows=4, eos_token_id=ENDS),
    "prompts in chunks": partial(roll_out, lens=LONG, prefill_chunk=5, max_rows=2),
    "given tokens": partial(converse, chunk=4),
    "turns": lambda model, cache, **options: talk_through(model, cache, Talk(), **options),
    "turns of rows that wait": lambda model, cache, **options: talk_through(
        model, cache, Talk(delay_s=0.02), max_rows=4, max_new_tokens=40, **options
    ),
}


@cache
def sampled(subject: str, way: str) -> Rollout:
    one = SUBJECTS[subject]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_rlkv.rollout.decoder.FIRST_TOKENS", 3)  # so that a dense cache grows
        return WAYS[way](one(), one.cache, **one.options)


def in_ways(shift: int) -> list[tuple[str, str]]:
    """Return every subject with one way, and every way with several subjects."""
    return [(subject, [*WAYS][(number + shift) % len(WAYS)]) for number, subject in enumerate(SUBJECTS)]


GROWS = [(subject, "samples of a prompt") for subject in SUBJECTS if subject.endswith("dense cache")]
BEGINS_LATE = [(subject, "prompts in chunks") for subject in ("states of qwen3_next", "windows of gemma3")]
"""Rows of short prompts, which begin while others go on, and were another prompt's before."""
SHORT = dict.fromkeys([*in_ways(0), *GROWS, *BEGINS_LATE])


@pytest.mark.parametrize(("subject", "way"), short_tier({**SHORT, **dict.fromkeys(in_ways(3))}, SHORT))
def test_the_learner_computes_what_the_sampler_did(subject: str, way: str):
    one, rollout = SUBJECTS[subject], sampled(subject, way)
    assert gap(one(), rollout) < TOLERANCE
    assert ((rollout.evicted_at > 0) == rollout.attention_mask[:, None, None]).all()
    if one.wrong is not None:
        assert gap(one(), one.wrong(rollout)) > CAUGHT


@pytest.mark.parametrize("way", ["rows taken over", "given tokens"])
@pytest.mark.parametrize("subject", ["h2o", "dense", "a budget of each layer", "sets as ids", "sets as bits"])
def test_steps_that_run_without_their_python_record_the_same(
    subject: str, way: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(SlotCache, "n_filled", None)  # a graph reads empty slots, too
    one, before = SUBJECTS[subject], RecordedRunner.n_replays
    plain = WAYS[way](one(), one.cache, **one.options)
    monkeypatch.setattr("lit_rlkv.rollout.decoder.CudaGraphRunner", RecordedRunner)
    found = WAYS[way](one(), one.cache, **one.options)
    assert RecordedRunner.n_replays > before + 5
    tensors = [(rollout.tensors(), rollout.kv_bytes) for rollout in (found, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*(each for each, _ in tensors), strict=True))


def joined_with_itself(rollout: Rollout) -> list[Rollout]:
    return [joined([rollout, rollout.rows(slice(1, 3))], rollout.input_ids.shape[1] + 4, PAD)]


OPERATIONS: dict[str, Callable[[Rollout], list[Rollout]]] = {
    "other rows": lambda rollout: [rollout.rows(torch.tensor(rows)) for rows in ([5, 0, 2, 2], [3])],
    "more padding": lambda rollout: [widened(rollout, rollout.input_ids.shape[1] + 5, PAD, n_left=3)],
    "passes of few tokens": lambda rollout: [part for _, part in passes(rollout, 40)],
    "joined": joined_with_itself,
}
MOVED = [
    *("h2o", "dense", "windows of llama4", "states of qwen3_next", "sets as ids", "int8 codes"),
    *("experts of mixtral", "all parts"),
]


@pytest.mark.parametrize(("subject", "operation"), diagonal(MOVED, OPERATIONS))
def test_a_record_moves_with_its_rows(subject: str, operation: str):
    one, rollout = SUBJECTS[subject], sampled(subject, "samples of a prompt")
    assert len(set(rollout.response_mask.sum(dim=1).tolist())) > 2
    change = OPERATIONS[operation]
    assert max(gap(one(), part) for part in change(rollout)) < TOLERANCE
    if one.wrong is not None:
        assert max(gap(one(), part) for part in change(one.wrong(rollout))) > CAUGHT


@pytest.mark.parametrize("limit", [1, 40])
def test_log_probs_of_passes_go_back_to_the_columns_of_the_rollout(limit: int):
    rollout, model = sampled("h2o", "samples of a prompt"), tiny_model("qwen3")
    found = torch.full(rollout.input_ids.shape, torch.nan)
    with torch.no_grad():
        for rows, part in passes(rollout, limit):
            found[rows] = unpacked(replay_logps(model, part), rollout.attention_mask, rows)
    torch.testing.assert_close(found, rollout.rollout_logps, rtol=0, atol=TOLERANCE)
