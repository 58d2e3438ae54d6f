import ast
import importlib
import subprocess

import pytest
import record
from command_line import Parser

SCRIPTS = {
    path.stem: path.read_text()
    for path in sorted((record.ROOT / "benchmarks").glob("*.py"))
    if "command_line.Parser" in path.read_text()
}
NOT_RECORDED = {"gpu", "golden"}
"""Scripts that write to a file that their command line names."""


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


@pytest.mark.parametrize("script", sorted(SCRIPTS.keys() - NOT_RECORDED))
def test_a_benchmark_adds_rows_to_the_results_only_if_asked_to(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [script, "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(script).main()
    told = " ".join(capsys.readouterr().out.split())
    assert "--record append rows to benchmarks/results/" in told
    assert "--no-record" not in told


def test_only_the_record_opens_files_of_results():
    for path in (record.ROOT / "benchmarks").rglob("*.py"):
        found = [
            call
            for call in ast.walk(ast.parse(path.read_text()))
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            if call.func.attr == "open" and any(getattr(mode, "value", "") == "a" for mode in call.args)
        ]
        # stages.py keeps the log of a GPU run beside its rows.
        assert len(found) == (path.name in ("record.py", "stages.py")), path


def test_rows_without_a_record_are_those_of_the_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    (tmp_path / "x.jsonl").write_text('{"value": 1}\n')
    Parser("x", "x").parse_args([])
    record.append("x", {"value": 2})
    record.append("x", {"value": 3})
    assert [row["value"] for row in record.rows("x")] == [1, 2, 3]
    assert record.rows("y") == []
    assert (tmp_path / "x.jsonl").read_text() == '{"value": 1}\n'
    assert capsys.readouterr().err == "not recorded; --record adds rows to benchmarks/results/x.jsonl\n"


def test_a_fast_look_is_never_recorded(capsys):
    parser = Parser("x", "x")
    parser.add_argument("--fast", action="store_true")
    with pytest.raises(SystemExit):
        parser.parse_args(["--fast", "--record"])
    assert "leave it out with --record" in capsys.readouterr().err


def test_rows_of_all_names_can_share_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path / "gpu.jsonl"))
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
