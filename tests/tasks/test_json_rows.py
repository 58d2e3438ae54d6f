"""Objects of JSON files, one per line or in one list: their lines, and what is refused."""

import json

import pytest

from lit_rlkv.tasks import load_preferences, load_problems
from lit_rlkv.tasks.json_rows import numbered_lines, numbered_objects, parse_object, reading_progress
from lit_rlkv.tasks.rows import parse_rows

LINE = '{"prompt": "1+1=", "answer": "2"}'


def test_blank_lines_count_but_are_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    # The last line has characters that str.splitlines cuts at and JSON allows inside a text.
    path.write_text('{"a": 1}\n\n  \n{"a": "x\u2028\x85y"}\n', encoding="utf-8")
    (first, one), (second, two) = numbered_lines(path)
    assert (first, second) == (f"{path}:1", f"{path}:4")
    assert (parse_object(one), parse_object(two)) == ({"a": 1}, {"a": "x\u2028\x85y"})


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n', encoding="utf-8-sig")
    assert [parse_object(line) for _, line in numbered_lines(path)] == [{"a": 1}]


def test_a_path_in_the_home_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [*numbered_lines(type(tmp_path)("~/a.jsonl"))] == [("~/a.jsonl:1", "{}")]


def test_an_empty_json_file_has_no_rows(tmp_path):
    (tmp_path / "a.json").write_text("")
    with pytest.raises(ValueError, match=r"a\.json' must have lines, got none"):
        load_problems(str(tmp_path / "a.json"))


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "\\ud83d\\ude00"}\n')
    assert parse_rows(numbered_lines(tmp_path / "a.jsonl"), parse_object) == [{"a": "\U0001f600"}]


@pytest.mark.parametrize(
    "content",
    [
        f"[{LINE}, {LINE}]",
        f"\n [\n  {LINE}\n\t,\r\n {LINE} ]\n",
        f"\ufeff[{LINE},{LINE}]",
        json.dumps([json.loads(LINE)] * 2, indent=2),
        f"{LINE}\n{LINE}\n",
    ],
)
def test_a_json_file_holds_a_list_or_lines(tmp_path, content):
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(f"{LINE}\n{LINE}\n")
    of_json, of_lines = (load_problems(str(tmp_path / name)) for name in ("a.json", "a.jsonl"))
    assert [of_json.at(i).prompt for i in range(len(of_json))] == ["1+1=", "1+1="]
    assert of_json.digest == of_lines.digest


def test_values_of_a_list_have_the_line_they_begin_in(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"a":\n1}, {"a": 2},\n\n{"a": [3,\n4]}]')
    assert [place for place, _ in numbered_objects(path)] == [f"{path}:1", f"{path}:2", f"{path}:4"]
    assert parse_rows(numbered_objects(path), parse_object) == [{"a": 1}, {"a": 2}, {"a": [3, 4]}]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'[{"a": 1},\n{"a": "\xe9"}]', r"a\.json:2: not UTF-8"),
        ('[{"a": 1}]'.encode("utf-16"), r"a\.json is UTF-16; convert it: iconv"),
        (b'[\n{"a": "\\ud800"}]', r"a\.json:2: a text has half of a surrogate pair"),
        (b"[" * 200_000, r"a\.json:1: the JSON is nested too deeply"),
        (b'[{"a": 1},\n{"b": {"a": 1, "a": 2}}]', r"a\.json:2: the key 'a' is given twice"),
        (
            b'[{"a": 1},\n{"a": ' + b"9" * 5000 + b"}]",
            r"a\.json:2: a number has too many digits .* in quotes",
        ),
        ('[{"a": 1}]'.encode("utf-32"), r"a\.json is UTF-32; convert it: iconv -f UTF-32"),
        (b'[{"a": 1}\n{"a": 2}]', r"a\.json:2: the list has neither a comma nor its end here"),
        (b'[{"a": 1},\n{"a": oops}]', r"a\.json:2: not JSON \(Expecting value"),
        (b'[{"a": 1},\n]', r"a\.json:2: not JSON"),
        (b'[{"a": 1},\n', r"a\.json:2: not JSON"),
        (b'[{"a": 1}', r"a\.json:1: the list has neither a comma nor its end here"),
        (b'[{"a": 1}]\n[]', r"a\.json:1: something follows the end of the list"),
        (b"[ \n]", r"a\.json' must have rows, got an empty list"),
        (b'[{"a": 1},\n3]', r"a\.json:2: must be an object, got int; write"),
        (
            b'\n{\n"data": [{"a": 1}]}',
            r"a\.json' has an object over several lines outside of a list; write",
        ),
        (b'{"a": 1}\n{"a": "\xe9"}\n', r"a\.jsonl:2: not UTF-8"),
        ('{"a": 1}\n'.encode("utf-16"), r"a\.jsonl is UTF-16; convert it: iconv"),
        (b'{"a": "\\ud800"}\n', r"a\.jsonl:1: a text has half of a surrogate pair"),
        (b"[" * 200_000 + b"\n", r"a\.jsonl:1: the JSON is nested too deeply"),
        (b'{"a": 1}\n{"b": ' + b"9" * 5000 + b"}\n", r"a\.jsonl:2: a number has too many digits"),
        (b'{"a": 1}\n{"b": {"a": 1, "a": 2}}\n', r"a\.jsonl:2: the key 'a' is given twice"),
    ],
)
def test_a_bad_file_is_refused_with_the_line(tmp_path, content, says):
    path = tmp_path / ("a.jsonl" if "jsonl" in says else "a.json")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        parse_rows(numbered_objects(path), parse_object)


def test_the_ending_of_a_name_may_be_in_capitals(tmp_path):
    path = tmp_path / "A.JSON"
    path.write_text('[\n{"prompt": "?", "chosen": "a",\n"rejected": "b"}]')
    assert load_preferences(str(path)).at(0).answer == "a"


def test_preferences_are_read_from_a_list(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": "?", "chosen": "a", "rejected": "b"}]))
    assert load_preferences(str(path)).at(0).answer == "a"


def test_the_progress_of_a_list_is_told(tmp_path):
    path, seen = tmp_path / "a.json", []
    path.write_text(json.dumps([json.loads(LINE)] * 3000))
    with reading_progress(lambda n_done, n_total: seen.append(n_done / n_total)):
        load_problems(str(path))
    assert seen == pytest.approx([1024 / 3000, 2048 / 3000], abs=1e-3)
