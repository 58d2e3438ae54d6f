import pytest

from lit_rlkv.files import write_atomically


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "rows.csv"
    for text in ("a,b\r\n1,2\r\n", "π\n"):
        write_atomically(path, text)
        assert path.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "rows.csv"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
