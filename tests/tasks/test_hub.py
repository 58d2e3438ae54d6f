"""Damaged files and datasets are refused in one line, and a folder gives no rows of files outside of it."""

import json

import pytest

from lit_rlkv.tasks import load_problems

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.usefixtures("datasets")

OWN = '{"prompt": "own", "answer": "1"}\n'


def not_utf8(values):
    """A column of strings that holds other bytes, as some programs write them."""
    return pyarrow.Array.from_buffers(pyarrow.string(), len(values), pyarrow.array(values).buffers())


@pytest.fixture
def folder(tmp_path):
    """An empty folder beside the cache of the package datasets."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)
    return path


def refusal(path, **options):
    """The one line with which a dataset is refused."""
    with pytest.raises(ValueError) as found:  # noqa: PT011
        load_problems(str(path), **options)
    assert "\n" not in str(found.value)
    assert type(found.value) is ValueError
    return str(found.value)


def test_text_that_is_not_utf8_is_named_with_its_row_in_a_chat_and_far_down(tmp_path):
    n_rows = 3000
    texts = [b"x"] * n_rows
    texts[2500] = b"\xe9"
    messages = pyarrow.StructArray.from_arrays(
        [pyarrow.array(["user"] * n_rows), not_utf8(texts)], names=["role", "content"]
    )
    chats = pyarrow.ListArray.from_arrays(pyarrow.array(range(n_rows + 1), pyarrow.int32()), messages)
    path = write(tmp_path / "a.parquet", prompt=chats, answer=["1"] * n_rows)
    assert refusal(path).startswith(f"{path} row 2500: a value cannot be read: 'utf-8' codec can't decode")


def test_several_rows_that_are_not_utf8_are_counted(tmp_path):
    path = write(tmp_path / "a.parquet", prompt=not_utf8([b"\xff"] * 7 + [b"a"]), answer=["1"] * 8)
    with pytest.raises(ValueError, match=r"^7 of 8 rows cannot be used, the first 5 are\n  .*row 0: a value"):
        load_problems(str(path))


def test_a_column_that_nobody_asked_for_may_hold_anything(tmp_path):
    other = not_utf8([b"1", b"\xff", b"2"])
    assert (
        len(load_problems(str(write(tmp_path / "a.parquet", prompt="abc", answer="abc", other=other)))) == 3
    )


@pytest.mark.parametrize("column", ["prompt", "answer"])
def test_a_null_is_named_with_its_row(tmp_path, column):
    columns = {"prompt": ["a", "b"], "answer": ["1", "2"]} | {column: ["a", None]}
    path = write(tmp_path / "a.parquet", **columns)
    assert refusal(path).startswith(f"{path} row 1: {column} must be ")


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_truncated_parquet_file_is_named(tmp_path, kept):
    path = write(tmp_path / "a.parquet", prompt=["a"] * 1000, answer=["1"] * 1000)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    assert refusal(path).startswith(f"cannot load split 'train' of '{path}': ArrowInvalid: Parquet ")


def test_values_nested_too_deep_are_refused(tmp_path):
    deep = pyarrow.array(["x"])
    for _ in range(200):
        deep = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1], pyarrow.int32()), deep)
    assert "too deeply nested" in refusal(write(tmp_path / "a.parquet", prompt=["a"], answer=deep))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"prompt,answer\na,1\nb,2,3\n"),
        ("a.csv", b"prompt,answer\na,1\n\xe9,2\n"),
        ("a.csv", b"prompt,answer\na,1\nb\n"),
        ("a.json", b'[{"prompt": "a", "answer": "1"},\n{"prompt": oops}]'),
        ("a.json", b'[{"prompt": "a", "answer": ' + b"[" * 3000 + b"]" * 3000 + b"}]"),
        ("a.jsonl", b'{"prompt": "a", "answer": "1"}\n{"prompt": "a"\n'),
        ("a.jsonl", b'{"prompt": "a", "answer": "1"}\n{"prompt": "\xe9", "answer": "1"}\n'),
    ],
)
def test_a_folder_with_a_damaged_file_is_refused(folder, name, content):
    (folder / name).write_bytes(content)
    assert str(folder) in refusal(folder)


def test_files_of_other_columns_in_one_folder_are_refused_in_one_line(folder):
    write(folder / "a.parquet", prompt=["a"], answer=["1"])
    write(folder / "b.parquet", prompt=["a"], solution=["1"])
    assert "because column names don't match" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [("state.json", "{"), ("state.json", "{}"), ("state.json", "3"), ("dataset_info.json", "[]")],
)
def test_a_saved_dataset_with_a_damaged_file_is_refused(datasets, folder, name, content):
    datasets.Dataset.from_dict({"prompt": ["a"], "answer": ["1"]}).save_to_disk(str(folder))
    (folder / name).write_text(content)
    assert refusal(folder).startswith(f"cannot load split 'train' of '{folder}': ")


def test_the_split_is_part_of_the_place(datasets, folder):
    rows = {"prompt": ["a", None], "answer": ["1", "2"]}
    datasets.DatasetDict(test=datasets.Dataset.from_dict(rows)).save_to_disk(str(folder))
    assert refusal(folder, split="test").startswith(f"{folder} test row 1: prompt must")


README = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: {path}
---
"""


@pytest.mark.parametrize("name", ["../secret.jsonl", "{outside}", "file://{outside}"])
def test_a_folder_gives_no_rows_of_files_outside_of_it(folder, tmp_path, name):
    outside = tmp_path / "secret.jsonl"
    outside.write_text('{"prompt": "secret", "answer": "1"}\n')
    (folder / "own.jsonl").write_text(OWN)
    (folder / "README.md").write_text(README.format(path="own.jsonl"))
    load_problems(str(folder))
    (folder / "README.md").write_text(README.format(path=name.format(outside=outside)))
    assert "secret.jsonl, which is not in the folder" in refusal(folder)


def test_a_folder_gives_no_rows_of_the_network(folder, httpserver_rows):
    (folder / "own.jsonl").write_text(OWN)
    (folder / "README.md").write_text(README.format(path=httpserver_rows))
    assert "secret.jsonl, which is not in the folder" in refusal(folder)


def test_a_saved_dataset_gives_no_rows_of_files_outside_of_it(datasets, tmp_path):
    for name in ("own", "secret"):
        rows = [{"prompt": name, "answer": "1"}]
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / name))
    state = tmp_path / "own" / "state.json"
    (file,) = (tmp_path / "secret").glob("*.arrow")
    changed = json.loads(state.read_text()) | {"_data_files": [{"filename": f"../secret/{file.name}"}]}
    state.write_text(json.dumps(changed))
    assert "which is not in the folder" in refusal(tmp_path / "own")
