import io
import os
import time
from pathlib import Path

import pytest

from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.files import (
    ABANDONED_S,
    DamagedFileError,
    WriteError,
    append_if_possible,
    atomic_dir,
    check_yaml,
    complete_lines,
    fingerprint,
    is_disk_full,
    json_lines,
    read_bytes,
    read_if_there,
    read_json,
    sweep_partial,
    write_atomically,
)
from tests.runs.test_checkpoint import files_of_at_most


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "rows.csv"
    for text in ("a,b\r\n1,2\r\n", "π\n"):
        write_atomically(path, text)
        assert path.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "rows.csv"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("error", "is_known"),
    [
        (RuntimeError("basic_ios::clear: iostream error"), True),
        (RuntimeError("[enforce fail at inline_container.cc:664]"), True),
        (Exception("No space left on device (os error 28)"), True),
        (Exception("File too large (os error 27)"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("No space left on device (os error 28)"), False),
    ],
)
def test_errors_of_libraries_that_cannot_write_a_file_are_known(tmp_path, error, is_known):
    with pytest.raises(WriteError if is_known else type(error)) as found, atomic_dir(tmp_path / "x"):
        raise error
    assert is_disk_full(found.value) is is_known


def test_a_library_that_may_not_write_says_nothing_of_a_full_disk(tmp_path):
    with pytest.raises(WriteError) as found, atomic_dir(tmp_path / "x"):
        raise Exception("Permission denied (os error 13)")
    assert not is_disk_full(found.value)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("replaces", "holds"), [(True, "new"), (False, "old")])
def test_a_folder_appears_whole_or_not_at_all(tmp_path, replaces, holds):
    folder = tmp_path / "model"
    with atomic_dir(folder) as partial:
        (partial / "weights").write_text("old")
        assert not folder.exists()
    with atomic_dir(folder, replaces=replaces) as partial:
        (partial / "weights").write_text("new")
    assert (folder / "weights").read_text() == holds
    with pytest.raises(FileNotFoundError), atomic_dir(folder) as partial:
        (partial / "nowhere" / "weights").touch()
    assert (folder / "weights").read_text() == holds
    assert names_in(tmp_path) == ["model"]


def test_leftovers_of_a_killed_process_are_deleted_and_no_other_files(tmp_path):
    for name in (".model-1.77.partial", ".model-2.77.partial-discarded", ".other.77.partial", "model-1"):
        (tmp_path / name).mkdir()
    sweep_partial(tmp_path, "model")
    assert names_in(tmp_path) == [".other.77.partial", "model-1"]


def leave_partial(root, name, age_s):
    path = root / f".{name}.5e1f.partial"
    (path / "deep").mkdir(parents=True)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_only_abandoned_leftovers_are_deleted_where_others_may_write(tmp_path):
    leave_partial(tmp_path, "killed", ABANDONED_S + 60)
    young = leave_partial(tmp_path, "perhaps-at-work", ABANDONED_S - 60)
    sweep_partial(tmp_path, is_shared=True)
    assert names_in(tmp_path) == [young.name]
    sweep_partial(tmp_path)  # where nobody else writes, age does not matter
    assert names_in(tmp_path) == []


def test_two_may_write_one_folder_and_the_faster_one_counts(tmp_path):
    folder = tmp_path / "model[1]"
    leave_partial(tmp_path, "model[1]", ABANDONED_S + 60)
    other = leave_partial(tmp_path, "model[1]-b", ABANDONED_S + 60)
    with atomic_dir(folder, replaces=False) as slow:
        (slow / "weights").write_text("slow")
        with atomic_dir(folder, replaces=False) as fast:
            assert sorted([slow.name, fast.name, other.name]) == names_in(tmp_path)
            (fast / "weights").write_text("fast")
    assert (folder / "weights").read_text() == "fast"
    assert names_in(tmp_path) == [other.name, "model[1]"]


def test_a_folder_that_cannot_take_its_name_says_so(tmp_path):
    (tmp_path / "model").touch()
    with pytest.raises(NotADirectoryError), atomic_dir(tmp_path / "model", replaces=False) as partial:
        (partial / "weights").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_weights_have_another_fingerprint(tmp_path):
    path = tmp_path / "deep" / "a.safetensors"
    path.parent.mkdir()
    content = bytearray(10_000_000)
    path.write_bytes(content)
    known = fingerprint(tmp_path, "**/*.safetensors")
    assert fingerprint(tmp_path, "**/*.safetensors") == known
    (tmp_path / "notes.txt").touch()
    assert fingerprint(tmp_path, "**/*.safetensors") == known
    for place in (0, 5_000_000 // 65_536 * 65_536, len(content) - 1):
        changed = content.copy()
        changed[place : place + 200_000] = b"x" * len(changed[place : place + 200_000])
        path.write_bytes(changed)
        assert fingerprint(tmp_path, "**/*.safetensors") != known
    path.write_bytes(content)
    path.rename(tmp_path / "deep" / "b.safetensors")
    assert fingerprint(tmp_path, "**/*.safetensors") != known


def test_a_line_that_was_cut_short_is_none_and_only_a_line_end_ends_one(tmp_path):
    path = tmp_path / "samples.jsonl"
    assert complete_lines(path) == []
    path.write_bytes("π\u2028\n\nπ".encode()[:-1])  # within a character
    assert complete_lines(path) == ["π\u2028", ""]


def test_a_failed_append_leaves_complete_lines_and_a_warning(tmp_path, monkeypatch, caplog):
    path = tmp_path / "samples.jsonl"
    append_if_possible(path, "one\n")

    class Full(io.StringIO):
        def write(self, text):
            with open(path, "a") as file:
                file.write(text[:2])
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *args, **options: Full())
        append_if_possible(path, "two\n")
    append_if_possible(path, "three\n")
    assert path.read_text() == "one\nthree\n"
    assert "No space left on device" in caplog.text


def test_a_pipe_a_folder_and_a_file_that_is_too_large_are_refused_at_once(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    assert read_bytes(tmp_path / "file", most=5) == b"12345"
    with pytest.raises(ValueError, match="at most 4 bytes, and has 5"):
        read_bytes(tmp_path / "file", most=4)
    for read in (read_bytes, read_json, complete_lines):
        with pytest.raises(ValueError, match="must be a regular file"):
            read(tmp_path / "pipe")  # a plain read would wait forever
    n_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Is a directory"):
        read_bytes(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_json_that_is_nested_too_deeply_is_a_value_error(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 200_000 + "]" * 200_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "deep.json")


def test_yaml_with_an_alias_is_refused_before_it_is_expanded():
    check_yaml("a: 'x * y'\nb: [1, 2]")
    with pytest.raises(ValueError, match=r"line 2 has an alias \(\*a\)"):
        check_yaml("a: &a [1]\nb: *a")
    with pytest.raises(ValueError, match="at most 1,048,576 bytes"):
        check_yaml("a: " + "x" * (1 << 20))


def test_a_damaged_file_is_named_and_left_as_it_is(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert read_if_there(path, json_lines, [0]) == [0]
    path.write_text("1\n2\n")
    assert read_if_there(path, json_lines, [0]) == [1, 2]
    path.write_text("1\n{\n")
    with pytest.raises(DamagedFileError, match=f"^{path} is damaged"):
        read_if_there(path, json_lines, [0])
    assert path.read_text() == "1\n{\n"


def test_a_tokenizer_that_cannot_be_written_is_an_error_of_the_disk(tmp_path):
    whole = tmp_path / "whole"
    tokenizer = build_task_tokenizer()
    tokenizer.save_pretrained(whole)
    n_bytes = (whole / "tokenizer.json").stat().st_size - 1
    assert n_bytes > (whole / "tokenizer_config.json").stat().st_size
    with (
        files_of_at_most(n_bytes),
        pytest.raises(WriteError) as found,
        atomic_dir(tmp_path / "model") as partial,
    ):
        tokenizer.save_pretrained(partial)
    assert is_disk_full(found.value)
    assert names_in(tmp_path) == ["whole"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), True),
        (OSError(122, "Disk quota exceeded"), True),
        (FileNotFoundError(2, "No such file or directory"), False),
        (ValueError("No space left on device"), False),
    ],
)
def test_a_full_disk_is_known_also_by_the_cause_of_an_error(error, expected):
    assert is_disk_full(error) is expected
    outer = OSError("the last checkpoint cannot be saved")
    outer.__cause__ = error
    assert is_disk_full(outer) is expected
