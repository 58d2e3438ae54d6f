"""Values of JSON files, one per line or in one list: their places, and what is refused."""

import json

import pytest

from lit_rlkv.tasks import JsonlTask, load_preferences, load_problems
from lit_rlkv.tasks.json_rows import numbered_values

LINE = '{"prompt": "1+1=", "answer": "2"}'


def test_blank_lines_count_but_are_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    # The last line has characters that str.splitlines cuts at and JSON allows inside a text.
    path.write_text('{"a": 1}\n\n  \n{"a": "x\u2028\x85y"}\n', encoding="utf-8")
    assert [*numbered_values(path)] == [(f"{path}:1", {"a": 1}), (f"{path}:4", {"a": "x\u2028\x85y"})]


def test_a_path_in_the_home_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [*numbered_values(type(tmp_path)("~/a.jsonl"))] == [("~/a.jsonl:1", {})]


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "\\ud83d\\ude00", "answer": "2"}\n')
    assert JsonlTask(tmp_path / "a.jsonl").at(0).prompt == "\U0001f600"


@pytest.mark.parametrize(
    "content",
    [
        f"[{LINE}, {LINE}]",
        f"\n [\n  {LINE}\n\t,\r\n {LINE} ]\n",
        f"\ufeff[{LINE},{LINE}]",
        f"\ufeff{LINE}\n{LINE}\n",
        json.dumps([json.loads(LINE)] * 2, indent=2),
    ],
)
@pytest.mark.parametrize("name", ["a.json", "A.JSONL"])
def test_a_file_holds_a_list_or_lines(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "plain.jsonl").write_text(f"{LINE}\n{LINE}\n")
    found, plain = (load_problems(str(tmp_path / each)) for each in (name, "plain.jsonl"))
    assert [found.at(i).prompt for i in range(len(found))] == ["1+1=", "1+1="]
    assert found.digest == plain.digest


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", r"a\.json' must have rows, got none"),
        (b" \n\n", r"a\.json' must have rows, got none"),
        (b"[ \n]", r"a\.json' must have rows, got none"),
        (b'[{"a": 1},\n{"a": "\xe9"}]', r"a\.json: not JSON \('utf-8' codec can't decode"),
        (b'[{"a": 1},\n{"a": oops}]', r"a\.json: not JSON \(Expecting value: line 2"),
        (b'[{"a": 1}', r"a\.json: not JSON .* line 1"),
        (b'[{"a": 1}]\n[]', r"a\.json: not JSON \(Extra data: line 2"),
        (b"[" * 200_000, r"a\.json: not JSON \(maximum recursion depth"),
        (b'[{"prompt": "a", "answer": "1"},\n3]', r"a\.json row 1: a row must be an object, got int"),
        (b'[\n{"prompt": "\\ud800", "answer": "1"}]', r"a\.json row 0: 'utf-8' codec can't encode"),
        (LINE.encode() + b'\n{"prompt": "\xe9"}\n', r"a\.json:2: not JSON \('utf-8' codec can't decode"),
        (LINE.encode("utf-16"), r"a\.json:1: not JSON \('utf-8' codec can't decode"),
        (b'{"prompt": "\\ud800", "answer": "1"}\n', r"a\.json:1: 'utf-8' codec can't encode"),
        (LINE.encode() + b'\n{"a": ' + b"9" * 5000 + b"}\n", r"a\.json:2: not JSON \(Exceeds the limit"),
        (LINE.encode() + b'\n{"a": ' + b"[" * 200_000, r"a\.json:2: not JSON \(maximum recursion depth"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path, content, says):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=says):
        load_problems(str(tmp_path / "a.json"))


def test_preferences_are_read_from_a_list(tmp_path):
    path = tmp_path / "A.JSON"
    path.write_text('[\n{"prompt": "?", "chosen": "a",\n"rejected": "b"}]')
    assert load_preferences(str(path)).at(0).answer == "a"
