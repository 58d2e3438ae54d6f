import struct

import pytest

from lit_rlkv.reporting.loggers.wandb_run import (
    BLOCK,
    HEADER,
    last_iteration,
    records,
    run_files,
    truncate_incomplete,
)


def piece(kind, data):
    return struct.pack("<IHB", 0, len(data), kind) + data


def log(*pieces):
    return b"\0" * HEADER + b"".join(pieces)


FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def test_records_are_read_with_the_place_where_they_end():
    # header 7, then 7 + 3 bytes and 7 + 2
    found = list(records(log(piece(FULL, b"abc"), piece(FULL, b"de"))))
    assert found == [(17, b"abc"), (26, b"de")]


def test_a_long_record_is_put_together():
    found = list(records(log(piece(FIRST, b"ab"), piece(MIDDLE, b"cd"), piece(LAST, b"e"))))
    assert [data for _, data in found] == [b"abcde"]


@pytest.mark.parametrize("n_left", [0, 1, 6])
def test_the_end_of_a_block_that_holds_no_piece_is_skipped(n_left):
    # a block has 32768 bytes: header 7, piece header 7, data, and n_left bytes of padding
    first = b"x" * (BLOCK - HEADER - 7 - n_left)
    whole = log(piece(FULL, first)) + b"\0" * n_left + piece(FULL, b"next")
    assert [data for _, data in records(whole)] == [first, b"next"]


def test_the_unused_rest_of_a_block_is_skipped():
    first = log(piece(FULL, b"abc"))
    whole = first + b"\0" * (BLOCK - len(first)) + piece(FULL, b"next")
    assert [data for _, data in records(whole)] == [b"abc", b"next"]


@pytest.mark.parametrize(
    "torn",
    [piece(FULL, b"defg")[:-1], piece(FULL, b"defg")[:5], piece(FIRST, b"defg"), piece(FIRST, b"d") + b"\1"],
)
def test_a_record_that_was_cut_short_is_left_out_and_cut_off(tmp_path, torn):
    path = tmp_path / "run.wandb"
    whole = log(piece(FULL, b"abc"))
    path.write_bytes(whole + torn)
    assert [data for _, data in records(path.read_bytes())] == [b"abc"]
    truncate_incomplete(path)
    assert path.read_bytes() == whole


def test_a_whole_file_is_left_as_it_is(tmp_path):
    path = tmp_path / "run.wandb"
    path.write_bytes(log(piece(FULL, b"abc"), piece(FIRST, b"d"), piece(LAST, b"e")))
    before = path.read_bytes()
    truncate_incomplete(path)
    assert path.read_bytes() == before


def test_a_file_without_a_record_is_removed(tmp_path):
    path = tmp_path / "run.wandb"
    path.write_bytes(log())
    truncate_incomplete(path)
    assert not path.exists()


def test_the_last_iteration_is_the_highest_that_was_logged(tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    def row(**values):
        record = Record()
        for key, value in values.items():
            record.history.item.add(nested_key=[key], value_json=str(value))
        return piece(FULL, record.SerializeToString())

    path = tmp_path / "run.wandb"
    path.write_bytes(log(row(iteration=1.0), row(iteration=3.0, reward=9), row(reward=7), piece(FULL, b"")))
    assert last_iteration(path, "iteration") == 3
    assert last_iteration(path, "reward") == 9
    assert last_iteration(path, "loss") == 0


def test_only_the_files_of_that_run_are_its_segments(tmp_path):
    names = ["offline-run-1-abc", "offline-run-1-abc-1", "run-2-abc", "offline-run-3-xyz", "latest-run"]
    for name in names:
        (tmp_path / "wandb" / name).mkdir(parents=True)
        run_id = "xyz" if "xyz" in name else "abc"
        (tmp_path / "wandb" / name / f"run-{run_id}.wandb").touch()
    assert [path.parent.name for path in run_files(tmp_path, "abc")] == names[:3]
