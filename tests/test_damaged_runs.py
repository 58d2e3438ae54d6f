"""A run whose side files are damaged resumes, is scored and is exported without them."""

import json
import os
from shutil import copytree, rmtree

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.config.commands import ExportConfig
from lit_rlkv.config.options import convert
from lit_rlkv.config.resumed import resumed_choices
from lit_rlkv.config.run_labels import Choices
from lit_rlkv.evaluate import evaluate
from lit_rlkv.export import export
from lit_rlkv.reporting.run_folder import read_run
from lit_rlkv.runs.open_run import find_run
from tests.tiers import short_tier
from tests.whole_runs import run, scoring

OPTIONS = ["diagnostics=light", "evaluation.budgets=[]", "evaluation.n_prompts=2", "evaluation.n_mismatch=2"]
SIDE_FILES = (
    "metrics.csv", "samples.jsonl", "diagnostics.jsonl",
    "evaluation.json", "environment.json", "evictions.json",
)  # fmt: skip
DAMAGE = {
    "binary": b"\xff\x00\n\xfe\n",
    "a list": b"[1]\n[2]\n",
    "other keys": b'{"iteration": 1}\n{"iteration": []}\n',
    "deep": b"[" * 200_000 + b"\n",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of two iterations."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder, "whole", *OPTIONS)
    return folder


def damaged(runs, folder, write):
    copytree(runs / "whole", folder)
    (folder / "report.html").unlink()
    for name in SIDE_FILES:
        (folder / name).unlink()
        write(folder / name)
    return folder


@pytest.mark.parametrize("kind", short_tier([*DAMAGE, "pipe"], ["other keys"]))
def test_a_run_resumes_without_damaged_side_files(runs, tmp_path, caplog, kind):
    write = os.mkfifo if kind == "pipe" else lambda path: path.write_bytes(DAMAGE[kind])
    folder = damaged(runs, runs / f"resumed {kind}", write)
    results = run(runs, folder.name, *OPTIONS, resumes=True)
    assert len(results.after) == 2
    for name in set(SIDE_FILES) - {"evictions.json"}:  # which is written anew
        assert f"{folder / name} is damaged and is left out" in caplog.text
        assert (folder / f"{name}.damaged").exists()
    assert (folder / "report.html").is_file()
    assert read_run(folder).history == read_run(runs / "whole").history[-1:]  # from the checkpoint
    assert f"{folder / 'metrics.csv'} lacks the rows of 1 of 2 iterations" in caplog.text
    assert len(read_run(folder).after) == 2  # all that was written since is intact


def test_a_config_of_gigabytes_is_one_line(runs, tmp_path):
    folder = damaged(runs, tmp_path / "damaged", lambda path: None)
    os.truncate(folder / "config.yaml", 6 * 2**30)  # sparse: it takes no space
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be used: it must have at most"):
        evaluate(scoring(folder))


def test_a_damaged_run_is_scored_and_exported(runs, tmp_path, caplog):
    folder = damaged(runs, tmp_path / "damaged", lambda path: path.write_bytes(b"[1]\n"))
    (folder / "choices.json").write_text("[1]")
    assert len(evaluate(scoring(folder)).rows) == 2
    written, _ = export(convert(ExportConfig, {"ckpt": str(folder), "to": str(tmp_path / "out")}))
    assert json.loads((written / "export.json").read_text())["iteration"] == 2
    assert "evaluation.json is damaged and is left out" in caplog.text
    resumed_choices(folder, Choices({}, []))
    assert "choices.json is damaged and is left out" in caplog.text
    assert [path.name for path in folder.iterdir() if path.name.endswith(".damaged")] == []


def test_a_trained_run_without_checkpoints_is_scored_with_a_warning(runs, tmp_path, caplog):
    folder = copytree(runs / "whole", tmp_path / "bare")
    rmtree(folder / "checkpoints")
    assert find_run(folder).iteration == 0
    assert "has rows of 2 iterations and no checkpoint, so this is the policy before training" in caplog.text
    caplog.clear()
    assert find_run(runs / "whole").iteration == 2
    assert caplog.text == ""


def test_a_checkpoint_is_found_without_zeros_in_its_name_or_those_that_exist_are_named(runs):
    checkpoints = runs / "whole" / "checkpoints"
    assert find_run(checkpoints / "iteration-2").iteration == 2
    for name in ("iteration-3", "2", "iteration--2", "iteration-²"):
        says = rf"has no checkpoint {name}; give one of iteration-000001, iteration-000002$"
        with pytest.raises(ConfigError, match=says):
            find_run(checkpoints / name)


def test_a_copied_checkpoint_is_found_by_its_own_name(runs, tmp_path):
    folder = copytree(runs / "whole", tmp_path / "copied")
    (folder / "checkpoints" / "iteration-000001").rename(folder / "checkpoints" / "iteration-2")
    assert find_run(folder / "checkpoints" / "iteration-2").iteration == 1


def test_a_run_that_begins_again_without_its_checkpoints_keeps_its_files(runs, caplog):
    folder = copytree(runs / "whole", runs / "bare")
    (folder / "report.html").unlink()
    rmtree(folder / "checkpoints")
    earlier = {
        name: (folder / name).read_bytes() for name in ("metrics.csv", "samples.jsonl", "diagnostics.jsonl")
    }
    run(runs, "bare", *OPTIONS, resumes=True)
    assert "has rows of 2 iterations and no checkpoint, so training begins again" in caplog.text
    for name, content in earlier.items():
        assert (folder / f"{name}.damaged").read_bytes() == content
    assert [row["iteration"] for row in read_run(folder).history] == [1, 2]
