"""Random models, caches, prompts and truncations: what the sampler chose from is recorded and replayed.

Log-probs and gradients are compared with a forward of transformers' model, and each recorded set with a loop
over sorted probabilities. Every case has its control: the same record with one more rank in each set.
"""

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from lit_rlkv import prepare_backbone, replay_logps
from lit_rlkv.types import Rollout, SamplingMasks
from tests.fuzz import explicit
from tests.fuzz.harness import cases, run_cases
from tests.fuzz.test_core import EXAMPLE, VOCAB, Case, check, random_cases

CAUGHT = 1e-3
"""Gap of a wrong record, in nats, that must show; that of a right one is below 1e-4."""


@st.composite
def truncations(draw: Any) -> dict[str, Any]:
    names = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7]))
    options = {
        "top_k": draw(st.integers(1, VOCAB - 1)),
        "top_p": draw(st.sampled_from([0.1, 0.5, 0.8, 0.95])),
        "min_p": draw(st.sampled_from([0.01, 0.05, 0.2, 0.6])),
    }
    return {name: value for bit, (name, value) in enumerate(options.items()) if names >> bit & 1}


def with_one_more_rank(rollout: Rollout, layers: explicit.Layers) -> Rollout:
    """The rollout with the likeliest dropped token added to each set."""
    assert rollout.record.sampling_masks is not None
    counts, ids = rollout.record.sampling_masks.counts.clone(), []
    for row, column, kept in explicit.sets(rollout):
        ranked = layers.logits[row, column - 1].argsort(descending=True).tolist()
        more = [token for token in ranked if token not in kept][:1]
        counts[row, column] = len(kept) + len(more)
        ids += [*sorted(kept), *more]
    return rollout.with_record(sampling_masks=SamplingMasks(counts, torch.tensor(ids, dtype=torch.int32)))


def check_with_control(case: Case, options: dict[str, Any]) -> float:
    """Check the record, and return the gap of its control."""
    rollout, layers = check(case, **options)
    assert rollout.record.sampling_masks is not None
    assert torch.equal(rollout.record.sampling_masks.counts > 0, rollout.response_mask)
    assert explicit.wrong_sets(rollout, layers, **options) == []
    wrong = with_one_more_rank(rollout, layers)
    with torch.no_grad():
        own, _ = explicit.log_probs(case.model(), wrong, case.temperature)
        replayed = replay_logps(prepare_backbone(case.model()), wrong, temperature=case.temperature)
    assert (replayed - own).abs().max() < 1e-4
    is_whole = bool((rollout.record.sampling_masks.counts[rollout.response_mask] == VOCAB).all())
    assert is_whole or explicit.wrong_sets(wrong, layers, **options) != []
    return float((replayed - rollout.rollout_logps).abs().max())


@cases(15, 150)
def test_recorded_sets_are_replayed_and_right(n_cases: int):
    run_cases(n_cases, check_with_control, case=random_cases(), options=truncations())


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_one_more_rank_shows_in_the_log_probs(options: dict[str, Any]):
    assert check_with_control(EXAMPLE, options) > CAUGHT


def test_a_record_of_other_numbers_is_caught_by_the_definition():
    rollout, layers = check(EXAMPLE, top_p=0.8)
    assert len(explicit.wrong_sets(rollout, layers, top_p=0.7)) > 10
    assert len(explicit.wrong_sets(rollout, layers, top_k=5)) > 10
