"""The lock of a run's folder."""

import errno
import os
import signal
import socket

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.runs.lock import LOCK, BusyError, FolderLock


@pytest.mark.parametrize("name", [LOCK, "samples.jsonl", "checkpoints", "wandb"])
def test_a_link_in_a_folder_leads_no_write_elsewhere(tmp_path, name):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    (run / "backbone").symlink_to(tmp_path)  # which runs have, and only read
    with FolderLock() as lock:
        lock.take(run)
    (run / name).symlink_to(outside)
    with pytest.raises(ConfigError, match=f"{name} is a link"), FolderLock() as lock:
        lock.take(run)
    assert not outside.exists()


def test_a_folder_has_one_writer_and_a_second_gets_its_pid(tmp_path):
    run = tmp_path / "runs" / "mine"
    with FolderLock() as first:
        first.take(run)
        with pytest.raises(BusyError) as refused, FolderLock() as second:
            second.take(run)
        assert str(refused.value).startswith(
            f"{run}: process {os.getpid()} on {socket.gethostname()} is at work there; wait until"
        )
        with FolderLock() as other:
            other.take(tmp_path)
    assert list(run.iterdir()) == []
    with FolderLock() as second:
        second.take(run)
        assert (run / LOCK).exists()


def test_a_folder_in_place_of_the_lock_is_named(tmp_path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(ConfigError, match=r"\.lock cannot be written"), FolderLock() as lock:
        lock.take(tmp_path)


def test_another_folder_is_taken_instead_of_the_first(tmp_path):
    with FolderLock() as lock, FolderLock() as other:
        lock.take(tmp_path / "a")
        lock.take(tmp_path / "b")
        other.take(tmp_path / "a")
        with pytest.raises(BusyError):
            other.take(tmp_path / "b")
        with pytest.raises(BusyError):  # what it could not exchange, it has kept
            lock.take(tmp_path / "a")


def test_a_process_that_is_killed_leaves_no_lock(tmp_path):
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            lock = FolderLock()
            lock.take(tmp_path)
            os.write(theirs, b"locked")
            signal.pause()
        finally:
            os._exit(1)
    os.close(theirs)
    assert os.read(ours, 6) == b"locked"
    with FolderLock() as lock:
        with pytest.raises(BusyError, match=f"process {child} on"):
            lock.take(tmp_path)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert (tmp_path / LOCK).exists()
        lock.take(tmp_path)
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()


def test_a_lock_that_was_removed_by_hand_is_not_taken_for_that_of_the_next(tmp_path):
    with FolderLock() as second:
        with FolderLock() as first:
            first.take(tmp_path)
            (tmp_path / LOCK).unlink()
            second.take(tmp_path)
        assert (tmp_path / LOCK).exists()
        with pytest.raises(BusyError), FolderLock() as third:
            third.take(tmp_path)


def no_locks(descriptor, operation):
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_file_locks_a_run_starts_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fcntl.flock", no_locks)
    with FolderLock() as first, FolderLock() as second:
        first.take(tmp_path)
        second.take(tmp_path)
    assert caplog.text.count("No locks available") == 2
    assert "a second process could write there" in caplog.text


def test_a_folder_that_cannot_be_made_is_a_mistake(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written.*--dir="):
        FolderLock("--dir=").take(tmp_path / "file" / "run")
