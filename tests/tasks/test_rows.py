"""Rows of files: read once at a start, however often their task is built."""

import json
from functools import partial

import pytest

from lit_rlkv.tasks import JsonlTask, load_preferences, load_problems, read_preferences

ROW = {"prompt": "1+1=", "answer": "2", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    "build",
    [
        JsonlTask,
        partial(JsonlTask, answer_after="####"),
        partial(load_problems, extra_columns=["chosen"]),
        load_preferences,
        read_preferences,
    ],
)
def test_a_file_is_read_once_until_it_changes(tmp_path, monkeypatch, build):
    read, parse = [], json.loads
    monkeypatch.setattr(json, "loads", lambda line: read.append(line) or parse(line))
    path = tmp_path / "rows.jsonl"
    for n_rows in (3, 2):
        path.write_text(f"{json.dumps(ROW)}\n" * n_rows)
        read.clear()
        assert [len(build(str(path))) for _ in range(3)] == [n_rows] * 3
        assert len(read) == n_rows


def test_what_rows_are_read_as_is_not_mixed_up(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW))
    assert load_problems(str(path)).at(0).prompt == "1+1="
    assert load_problems(str(path), prompt_column="chosen").at(0).prompt == "2"
    assert load_problems(str(path), answer_after="####").at(0).solution == "#### 2"
    assert JsonlTask(path).at(0).solution == "2"
    assert read_preferences(path).at(0).answer == "2"
