"""Rows of files, with their places and one report of all errors."""

import hashlib
import json

import pytest

from lit_rlkv.tasks import JsonlTask, load_preferences, load_problems, read_preferences
from lit_rlkv.tasks.rows import parse_prompt, parse_rows


def positive(number):
    if number <= 0:
        raise ValueError(f"{number} is not positive")
    return number


def test_rows_are_parsed_in_order():
    assert parse_rows([("a", 3), ("b", 1)], positive) == [3, 1]


def test_one_bad_row_is_one_line():
    with pytest.raises(ValueError, match=r"^b: 0 is not positive$"):
        parse_rows([("a", 3), ("b", 0)], positive)


@pytest.mark.parametrize("load", [load_problems, load_preferences, read_preferences, JsonlTask])
@pytest.mark.parametrize("source", ["", ["a", "b"], None])
def test_data_must_be_one_path(load, source):
    with pytest.raises(ValueError, match=r"the data must be one path or name, got .*; give it as text"):
        load(source)


def test_the_first_bad_rows_are_named_and_all_are_counted():
    rows = [(f"row {index}", index % 2) for index in range(20)]
    with pytest.raises(ValueError, match="10 of 20 rows") as caught:
        parse_rows(rows, positive)
    heading, *named = str(caught.value).split("\n")
    assert heading == "10 of 20 rows cannot be used, the first 5 are"
    assert named == [f"  row {index}: 0 is not positive" for index in (0, 2, 4, 6, 8)]


ROW = {"prompt": "1+1=", "answer": "2", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize("load", [JsonlTask, read_preferences])
def test_a_missing_file_is_named(tmp_path, load):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        load(tmp_path / "nowhere.jsonl")


def test_a_folder_with_too_many_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_rlkv.files.MAX_FILES", 2)
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "answer": "2"}')
    with pytest.raises(ValueError, match="has more than 2 files; give a folder of data alone"):
        load_problems(str(tmp_path))


def test_the_digest_of_rows_stays_what_it_always_was(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW | {"prompt": [{"role": "user", "content": "é"}]}))
    text = '{"prompt": [{"role": "user", "content": "\\u00e9"}], "solution": "2", "answer": "2", "extra": {}}'
    assert JsonlTask(path).digest == hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def test_a_long_text_is_left_out_of_the_error_and_the_advice_is_not(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "?", "answer": "x" * 10_000, "solution": "y"}))
    with pytest.raises(
        ValueError, match=r"rows\.jsonl:1: the solution 'y'.* \.\.\. .*or it would score 0"
    ) as found:
        JsonlTask(path)
    assert len(str(found.value)) < 1000


def test_parts_of_messages_that_no_prompt_keeps_are_refused_by_name():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    with pytest.raises(ValueError, match="role and content alone, got tool_calls"):
        parse_prompt(
            [{"role": "user", "content": "2*3?"}, call, {"role": "user", "content": "2*4?"}], "prompt"
        )
