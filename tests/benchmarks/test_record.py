import subprocess

import record


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_row_says_whether_the_package_was_changed_since_its_commit(tmp_path, monkeypatch):
    for name in ("benchmarks/results/x.jsonl", "lit_rlkv/a.py", "conf/config.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    commit = git(tmp_path, "rev-parse", "--short", "HEAD")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "results" / "x.jsonl").write_text("2\n")  # a row more is no change
    assert record.provenance()["commit"] == commit
    (tmp_path / "lit_rlkv" / "a.py").write_text("2\n")
    assert record.provenance()["commit"] == f"{commit}+changes"


def test_rows_are_read_back_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    assert record.rows("x") == []
    for value in (2, 1):
        record.append("x", {"value": value})
    assert [row["value"] for row in record.rows("x")] == [2, 1]


def test_rows_of_all_names_can_share_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ONE_FILE", str(tmp_path / "gpu.jsonl"))
    record.append("x", {"value": 1})
    record.append("y", {"value": 2})
    assert [row["value"] for row in record.rows("x")] == [1]
    assert record.find("y", value=2) is not None
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.jsonl"]


def test_a_row_is_found_by_its_entries_device_and_version_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    record.append("x", {"size": [1, 2], "value": 1})
    record.append("x", {"size": [1, 2], "value": 2})
    assert record.find("x", size=(1, 2))["value"] == 2
    assert record.find("x", size=(1, 3)) is None
    assert record.find("y", size=(1, 2)) is None
    monkeypatch.setattr(record, "_source", lambda root: "changed")
    assert record.find("x", size=(1, 2)) is None
