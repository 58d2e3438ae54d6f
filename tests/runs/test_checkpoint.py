"""Checkpoints: saving, loading, and detection of damage."""

import json
import logging
import os
import shutil
import signal
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from safetensors import SafetensorError, safe_open

from lit_rlkv import files
from lit_rlkv.files import atomic_dir
from lit_rlkv.runs import checkpoint
from lit_rlkv.runs.checkpoint import (
    LEARNER,
    REFERENCE,
    STATE,
    WEIGHTS,
    BrokenCheckpointError,
    Checkpoint,
    CheckpointDir,
    RetentionPolicy,
    digest,
    load_checkpoint,
)


def save(folder, iteration, reward=0.0, reference=None, **options):
    weights = {"w": torch.full((3,), float(iteration))}
    learner = {"optimizer": {"step": torch.tensor(iteration)}}
    return CheckpointDir(folder, RetentionPolicy(**options)).save(
        iteration, weights, learner, {"cursor": 8 * iteration}, {"reward": reward}, 2, reference=reference
    )


def iterations(folder):
    return [int(path.name.removeprefix("iteration-")) for path in CheckpointDir(folder).all()]


def test_a_checkpoint_loads_what_was_saved(tmp_path):
    path = save(tmp_path, 7, reward=0.1 + 0.2)
    found = CheckpointDir(tmp_path).latest()
    assert found.path == path
    assert (found.iteration, found.data_state, found.n_ranks) == (7, {"cursor": 56}, 2)
    assert found.metrics == {"reward": 0.1 + 0.2}
    assert torch.equal(found.weights()["w"], torch.full((3,), 7.0))
    assert found.learner_state()["optimizer"]["step"] == 7
    assert CheckpointDir(tmp_path / "none").latest() is None


def test_a_checkpoint_has_a_file_for_the_reference_only_if_there_is_something_to_save(tmp_path):
    plain = save(tmp_path, 1, reference={})
    assert {path.name for path in plain.iterdir()} == {WEIGHTS, LEARNER, STATE}
    assert load_checkpoint(plain).reference() == {}
    synced = save(tmp_path, 2, reference={"w": torch.arange(3.0)})
    assert {path.name for path in synced.iterdir()} == {WEIGHTS, REFERENCE, LEARNER, STATE}
    assert torch.equal(load_checkpoint(synced).reference()["w"], torch.arange(3.0))


def test_the_newest_stay(tmp_path):
    for iteration in (1, 2, 10, 11):
        save(tmp_path, iteration, n_last=2)
    assert iterations(tmp_path) == [10, 11]
    assert not (tmp_path / "best").exists()


@pytest.mark.parametrize(
    ("mode", "kept", "best"),
    # rewards 0.1, 0.9, 0.5, 0.9, 0.3 of iterations 1 to 5; the newer of equals comes first
    [("max", [2, 4, 5], 4), ("min", [1, 5], 1)],
)
def test_the_best_stay_too_and_one_name_leads_to_the_first(tmp_path, mode, kept, best):
    for iteration, reward in enumerate((0.1, 0.9, 0.5, 0.9, 0.3), start=1):
        save(tmp_path, iteration, reward, n_last=1, n_best=2, mode=mode)
    assert iterations(tmp_path) == kept
    assert load_checkpoint(tmp_path / "best").iteration == best


def test_a_metric_that_is_nan_or_missing_is_never_the_best(tmp_path):
    for iteration, reward in enumerate((0.5, torch.nan, 0.1), start=1):
        save(tmp_path, iteration, reward, n_last=1, n_best=1)
    assert iterations(tmp_path) == [1, 3]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(path):
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"iteration": 99}))


def without(*names):
    """Return the state of a checkpoint without these keys."""

    def strip(path):
        state = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in state.items() if key not in names}))

    return strip


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *product((WEIGHTS, REFERENCE, LEARNER, STATE), (truncate, flip, os.remove)),
        (STATE, edit),
        *[(STATE, without(*names)) for names in (["digest"], ["files"], ["digest", "files"])],
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, caplog, name, damage):
    save(tmp_path, 1)
    damage(save(tmp_path, 2, reference={"w": torch.arange(3.0)}) / name)
    with caplog.at_level(logging.WARNING):
        found = CheckpointDir(tmp_path).latest()
    assert found.iteration == 1
    assert "iteration-000002" in caplog.text
    with pytest.raises(
        BrokenCheckpointError,
        match=rf"iteration-000002/{name} (is missing|has changed).*; another checkpoint",
    ):
        load_checkpoint(tmp_path / "iteration-000002")


def test_training_does_not_restart_if_all_checkpoints_are_broken(tmp_path):
    truncate(save(tmp_path, 1) / WEIGHTS)
    with pytest.raises(BrokenCheckpointError, match=r"all 1 checkpoints .* are broken; .*remove the folder"):
        CheckpointDir(tmp_path).latest()


@pytest.mark.parametrize("is_read_first", [True, False])
def test_a_newest_that_is_discarded_while_it_is_looked_at_is_not_taken_for_a_broken_one(
    tmp_path, monkeypatch, caplog, is_read_first
):
    save(tmp_path, 1, n_last=1)

    def overtaken(path):
        monkeypatch.undo()
        found = digest(path) if is_read_first else None
        save(tmp_path, 2, n_last=1)
        return found or digest(path)

    monkeypatch.setattr(checkpoint, "digest", overtaken)
    assert CheckpointDir(tmp_path).latest().iteration == 2
    assert caplog.text == ""


def test_the_best_is_one_checkpoint_also_where_another_becomes_it_meanwhile(tmp_path, monkeypatch):
    save(tmp_path, 1, 0.1, n_last=2, n_best=1)

    def overtaken(path):
        monkeypatch.undo()
        save(tmp_path, 2, 0.2, n_last=2, n_best=1)
        return digest(path)

    monkeypatch.setattr(checkpoint, "digest", overtaken)
    found = load_checkpoint(tmp_path / "best")
    assert found.path.name == "iteration-000001"
    assert float(found.weights()["w"][0]) == found.iteration == 1


@contextmanager
def files_of_at_most(n_bytes):
    """A block in which no file can grow further, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("large", ["weights", "learner", "data"])
def test_a_checkpoint_that_cannot_be_written_leaves_the_older_ones(tmp_path, large):
    save(tmp_path, 1)
    many = torch.zeros(10_000)
    weights = {"w": many if large == "weights" else many[:3]}
    learner = {"step": many if large == "learner" else 1}
    data = {"cursors": [0] * 10_000 if large == "data" else []}
    with files_of_at_most(20_000), pytest.raises(OSError, match=r"File too large|inline_container"):
        CheckpointDir(tmp_path).save(2, weights, learner, data)
    assert iterations(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000001"]
    CheckpointDir(tmp_path).save(2, weights, learner, data)  # there is room again
    assert iterations(tmp_path) == [1, 2]


def save_until_killed(folder, module, name, n_calls):
    """Save iteration 3; killed right after so many calls of a function, if there are as many."""
    function, calls = getattr(module, name), []

    def counted(*args, **options):
        found = function(*args, **options)
        calls.append(name)
        if len(calls) == n_calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(module, name, counted)
    save(folder, 3, n_last=2)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (checkpoint, "save_file"),
        (torch, "save"),
        (checkpoint, "digest"),
        (files, "sync"),
        (os, "replace"),
        (shutil, "rmtree"),
    ],
)
def test_a_kill_in_the_middle_of_a_save_leaves_a_whole_checkpoint(tmp_path, module, name):
    places = 0
    while is_killed(tmp_path / str(places), module, name, places + 1):
        places += 1
    assert places >= {"sync": 5, "digest": 2, "replace": 2}.get(name, 1)


def is_killed(folder, module, name, n_calls):
    """True if a save called a function that often; a kill after the last call leaves intact files."""
    for iteration in (1, 2):
        save(folder, iteration)
    child = os.fork()
    if child == 0:
        try:
            save_until_killed(folder, module, name, n_calls)
        finally:
            os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    found = CheckpointDir(folder).latest()
    assert found.iteration in (2, 3)
    assert float(found.weights()["w"][0]) == found.iteration
    save(folder, 3)
    assert sorted(path.name for path in folder.iterdir()) == ["iteration-000002", "iteration-000003"]
    return killed


def test_another_error_is_not_taken_for_a_full_disk(tmp_path):
    with pytest.raises(RuntimeError, match="no disk"), atomic_dir(tmp_path / "folder"):
        raise RuntimeError("no disk")
    (tmp_path / "weights").write_text("nothing of the kind")
    with pytest.raises(SafetensorError), atomic_dir(tmp_path / "folder"):
        safe_open(tmp_path / "weights", framework="pt")


def test_files_have_the_permissions_of_their_folder(tmp_path):
    path = save(tmp_path, 1)
    for file in path.iterdir():
        assert file.stat().st_mode & 0o777 == path.stat().st_mode & 0o666


def test_a_file_in_place_of_the_folder_is_refused_and_not_found_when_saving(tmp_path):
    (tmp_path / "checkpoints").write_text("1")
    with pytest.raises(BrokenCheckpointError, match="checkpoints must be a folder"):
        CheckpointDir(tmp_path / "checkpoints").latest()


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"state\.json is missing"):
        load_checkpoint(tmp_path)


def test_pickled_objects_are_not_read(tmp_path):
    class Evil:
        def __reduce__(self):
            return shutil.rmtree, (str(tmp_path),)

    torch.save({"optimizer": Evil()}, tmp_path / LEARNER)
    with pytest.raises(Exception, match="Weights only load failed"):
        Checkpoint(tmp_path, 1, {}).learner_state()
    assert tmp_path.exists()


def test_a_state_file_that_is_a_pipe_or_names_files_elsewhere_is_broken_and_hangs_nothing(tmp_path):
    path = save(tmp_path, 1)
    state = json.loads((path / STATE).read_text())
    state.pop("digest")
    for names in ({"/dev/zero": "", WEIGHTS: "", LEARNER: ""}, {}, [WEIGHTS, LEARNER]):
        changed = state | {"files": names}
        (path / STATE).write_text(json.dumps(changed | {"digest": checkpoint._digest_of(changed)}))
        with pytest.raises(BrokenCheckpointError, match="has changed since it was written"):
            load_checkpoint(path)
    (path / STATE).unlink()
    os.mkfifo(path / STATE)
    with pytest.raises(BrokenCheckpointError, match=STATE):
        load_checkpoint(path)
