"""The record waits in host memory, and only what a forward replays of it comes to the device."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rlkv.models.packing import passes
from lit_rlkv.reporting.eviction_record import eviction_record
from lit_rlkv.types import Record, Rollout, TensorBatch
from tests.callbacks.measuring import ALGORITHMS, assert_same_training, trained
from tests.callbacks.test_diagnostics_leave_training_unchanged import all_diagnostics
from tests.experience.test_resampling import collected
from tests.invariants.test_record import OPERATIONS, SUBJECTS, WAYS
from tests.memories import HOST, two_memories
from tests.rollouts import TOLERANCE, gap, roll_out
from tests.test_learned_evictions import LEARNED
from tests.tiers import slow
from tests.whole_runs import config, rows_of, run

CASES = [
    ("h2o", "rows taken over"),
    ("windows of gemma3", "samples of a prompt"),
    ("sets as bits", "at once"),
    ("all parts", "turns"),
]


def devices_of(batch: TensorBatch) -> set[str]:
    return {tensor.device.type for tensor in batch.tensors()}


def sampled(subject: str, way: str) -> Rollout:
    one = SUBJECTS[subject]
    return WAYS[way](one(), one.cache, **one.options)


def same(found: Rollout, expected: Rollout) -> bool:
    pairs = zip(found.tensors(), expected.tensors(), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("subject", "way"), CASES)
def test_a_record_waits_on_the_host_until_its_micro_batch_comes(subject: str, way: str):
    one, expected = SUBJECTS[subject], sampled(subject, way)
    with two_memories():
        rollout = sampled(subject, way)
        assert devices_of(rollout.record) == {HOST.type}
        assert devices_of(replace(rollout, record=Record(rollout.input_ids))) == {"cpu"}
        assert gap(one(), rollout) < TOLERANCE
        for shadow in (True, False):
            view = rollout.record.view(rollout.attention_mask, shadow=shadow)
            assert devices_of(view) == {"cpu"}
        _, part = next(passes(rollout, 60))
        assert devices_of(part) == {"cpu"}
        assert gap(one(), part) < TOLERANCE
        found = rollout.to("cpu")
    assert same(found, expected)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_move_where_the_record_waits(operation: str):
    change = OPERATIONS[operation]
    expected = change(sampled("all parts", "samples of a prompt"))
    with two_memories():
        parts = change(sampled("all parts", "samples of a prompt"))
        is_packed = operation == "passes of few tokens"
        assert {*map(tuple, (devices_of(part.record) for part in parts))} == {
            ("cpu" if is_packed else HOST.type,)
        }
        found = [part.to("cpu") for part in parts]
    assert all(map(same, found, expected))


def test_a_reader_that_forgets_the_record_is_noticed(monkeypatch: pytest.MonkeyPatch):
    with two_memories():
        rollout = roll_out("llama", "h2o")
        with pytest.raises(RuntimeError, match="two memories"):
            _ = rollout.record.evicted_at > rollout.input_ids[:, None, None]
        monkeypatch.setattr(Record, "select", TensorBatch.select)
        with pytest.raises(RuntimeError, match="two memories"):
            next(passes(rollout, 60))


def test_a_report_shows_the_evictions_of_the_record():
    expected = eviction_record(roll_out("llama", "h2o"))
    with two_memories():
        assert eviction_record(roll_out("llama", "h2o")) == expected


@pytest.mark.parametrize(
    ("algorithm", "arm", "distills"), [("grpo", "shadow", True), slow("ppo", "tis", False)]
)
def test_training_with_all_diagnostics_is_the_same(algorithm: str, arm: str, distills: bool):
    options = {"arm": arm, "distills": distills, "rollout": {"max_new_tokens": 6}, **ALGORITHMS[algorithm]}
    plain = trained(all_diagnostics(), **options)
    with two_memories():
        found = trained(all_diagnostics(), **options)
    for row in (*plain[0], *found[0]):
        for name in [name for name in row if name.startswith(("perf/", "memory/"))]:
            del row[name]
    assert plain[0][0]["kv/overlap_mean"] < 1
    assert_same_training(plain, found)


def test_groups_are_replaced_where_the_record_waits():
    options = {"resample": 8, "rollout": {"max_new_tokens": 10, "top_p": 0.9}}
    expected = collected(**options).rollout
    with two_memories():
        experience = collected(**options)
        assert experience.n_rounds > 1
        assert devices_of(experience.rollout.record) == {HOST.type}
        found = experience.rollout.to("cpu")
    assert same(found, expected)


@pytest.mark.slow
def test_a_run_that_trains_its_evictions_is_the_same(tmp_path: Path, share_sft_model: Callable[..., Any]):
    share_sft_model(config(tmp_path, *LEARNED))
    run(tmp_path, "expected", *LEARNED)
    with two_memories():
        run(tmp_path, "found", *LEARNED)
    pairs = zip(rows_of(tmp_path / "found"), rows_of(tmp_path / "expected"), strict=True)
    for found, expected in pairs:
        names = [name for name in found if not re.search(r"time/|perf/|memory/|second", name)]
        assert any(name.startswith("eviction/") for name in names)
        assert {name: found[name] for name in names} == {name: expected[name] for name in names}
