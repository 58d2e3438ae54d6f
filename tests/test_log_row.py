"""Rows of another engine's log are checked part by part, and become a rollout that can be saved."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from lit_rlkv import NEVER, LogRow, Rollout
from lit_rlkv.types import Record

TIMES = [[[3, 4, NEVER, NEVER, NEVER]]]
FIELDS = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "logps": [-1.0, -2.0, -0.5], "evicted_at": TIMES}


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_lists_arrays_and_tensors_make_the_same_rollout(make):
    row = LogRow(**{name: make(values) for name, values in FIELDS.items()})
    rollout = Rollout.from_log([row, LogRow([1], [2, 3], [-1.0, -1.0])], temperature=0.5)
    assert rollout.input_ids.tolist() == [[5, 6, 7, 8, 9], [0, 1, 2, 3, 0]]
    assert rollout.attention_mask.tolist() == [[True] * 5, [False, True, True, True, False]]
    assert rollout.response_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert rollout.rollout_logps.tolist() == [[0, 0, -1, -2, -0.5], [0, 0, -1, -1, 0]]
    assert rollout.evicted_at.tolist() == [TIMES, [[[0, NEVER, NEVER, NEVER, 0]]]]
    assert (rollout.temperature, rollout.kv_bytes) == (0.5, 0)


def test_whole_numbers_are_logps_too():
    assert Rollout.from_log([LogRow([1], [2], [-1])]).rollout_logps.dtype == torch.float32


def test_times_move_with_the_padding_before_a_row():
    short = LogRow([1], [2, 3, 4], [-1.0] * 3, [[[2, NEVER, 3, NEVER]]])
    rollout = Rollout.from_log([LogRow(**FIELDS), short])
    assert rollout.evicted_at[1].tolist() == [[[0, 3, NEVER, 4, NEVER]]]


def test_tokens_that_the_engine_was_given_have_no_logps():
    row = LogRow([1], [2, 3, 4], [-1.0, None, -2.0], is_sampled=[True, False, True])
    rollout = Rollout.from_log([row])
    assert rollout.response_mask.int().tolist() == [[0, 1, 0, 1]]
    assert rollout.rollout_logps.tolist() == [[0, -1, 0, -2]]
    assert rollout.attention_mask.all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_ids": []}, "prompt_ids must be token ids, at least one"),
        ({"response_ids": None}, "^response_ids is None; give a number for each token"),
        ({"logps": None}, "^logps is None; give"),
        ({"response_ids": []}, "response_ids must be token ids, at least one"),
        ({"response_ids": [7, -1, 9]}, "none below 0, got -1 for token 1$"),
        ({"response_ids": [7.0, 8.0, 9.0]}, r"token ids, .* got torch.float32 \(3,\)"),
        ({"prompt_ids": [[5], [6, 7]]}, "prompt_ids must be numbers in equal rows"),
        ({"response_ids": [True, False, True]}, "token ids"),
        ({"prompt_ids": "a text"}, "prompt_ids must be numbers"),
        ({"logps": [-1.0, -2.0]}, r"each of the 3 response tokens, got \(2,\)"),
        ({"logps": [-1.0] * 5}, "leave out those of the prompt"),
        ({"logps": [0.3, 0.1, 0.6]}, "natural logarithms"),
        ({"logps": [-1.0, None, -0.5]}, "natural logarithms .* got None for token 1"),
        ({"logps": torch.tensor([-1.0, -0.5, float("nan")])}, "got nan for token 2"),
        ({"logps": [-1.0, float("-inf"), -0.5]}, "natural logarithms"),
        ({"is_sampled": [False] * 3}, "one of them True"),
        ({"is_sampled": [True] * 2}, "bools of the 3 response tokens"),
        ({"evicted_at": TIMES[0]}, r"\[layer, kv_head, token\] of 5 tokens, .* got torch.int64 \(1, 5\)"),
        ({"evicted_at": [[[3, 4, NEVER, NEVER]]]}, r"got torch.int64 \(1, 1, 4\)"),
        ({"evicted_at": [[[3.0, 4, 5, 5, 5]]]}, "whole numbers .* got torch.float32"),
        ({"evicted_at": [[[3, 1, 5, 5, 5]]]}, "got 1 for layer 0, KV head 0, key 1"),
        ({"evicted_at": [[[0, 4, 5, 5, 5]]]}, "got 0 for .* key 0"),
        ({"evicted_at": [[[3, 4, 6, 5, 5]]]}, "at most 5, the number of tokens, .* got 6"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, reason):
    with pytest.raises(ValueError, match=reason):
        LogRow(**FIELDS | change)


def test_an_end_of_the_row_and_larger_numbers_than_never_are_never_replayed():
    row = LogRow(**FIELDS | {"evicted_at": torch.tensor([[[5, 2**62, NEVER, NEVER, NEVER]]])})
    assert row.evicted_at.tolist() == [[[5, NEVER, NEVER, NEVER, NEVER]]]


def test_a_rollout_without_times_is_refused_when_it_is_made():
    rollout = Rollout.from_log([LogRow(**FIELDS)])
    with pytest.raises(TypeError, match=r"record must be a Record\(evicted_at, ...\) .*Record.dense"):
        rollout.with_record(evicted_at=None)


def test_evictions_can_be_moved_but_not_before_the_own_query():
    record = Record(torch.tensor([[[[0, 2, 5, NEVER]]]]))
    assert record.delayed(1).evicted_at.tolist() == [[[[0, 3, 6, NEVER]]]]
    assert record.delayed(-1).evicted_at.tolist() == [[[[0, 2, 4, NEVER]]]]


def test_a_saved_rollout_is_loaded_by_torch_alone(tmp_path):
    rollout = Rollout.from_log([LogRow(**FIELDS)])
    torch.save(rollout, path := tmp_path / "rollout.pt")
    wanted = rollout.evicted_at.tolist()
    code = f"import torch, lit_rlkv.types; assert torch.load({str(path)!r}).evicted_at.tolist() == {wanted}"
    subprocess.run([sys.executable, "-c", code], check=True)
