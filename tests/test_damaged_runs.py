"""A damaged side file of a run is named before any work, and nothing is overwritten."""

import os
from shutil import copytree, rmtree

import pytest

from lit_rlkv.config import ConfigError
from lit_rlkv.config.commands import ExportConfig
from lit_rlkv.config.options import convert
from lit_rlkv.config.run_labels import Choices
from lit_rlkv.evaluate import evaluate
from lit_rlkv.export import export
from lit_rlkv.files import DamagedFileError
from lit_rlkv.reporting.run_folder import read_run
from lit_rlkv.runs.open_run import find_run
from tests.whole_runs import config, run, scoring

OPTIONS = ["diagnostics=light", "evaluation.budgets=[]", "evaluation.n_prompts=2", "evaluation.n_mismatch=2"]
DAMAGE = {
    "metrics.csv": b"\xff\x00\n\xfe\n",
    "samples.jsonl": b"[1]\n[2]\n",
    "diagnostics.jsonl": b'{"iteration": 1}\n{"iteration": []}\n',
    "evaluation.json": b"[" * 200_000 + b"\n",
    "environment.json": None,  # a pipe
    "choices.json": b"[1]",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, share_sft_model):
    """A folder with a run of two iterations."""
    folder = tmp_path_factory.mktemp("runs")
    share_sft_model(config(folder))
    run(folder, "whole", *OPTIONS)
    Choices({}, ()).save(folder / "whole")
    return folder


def damage(path):
    path.unlink()
    content = DAMAGE[path.name]
    os.mkfifo(path) if content is None else path.write_bytes(content)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_side_file_is_named_and_kept(runs, name):
    folder = copytree(runs / "whole", runs / f"damaged {name}")
    (folder / "report.html").unlink()
    damage(folder / name)

    def resume():
        Choices.load(folder)  # which the command line asks for first
        run(runs, folder.name, *OPTIONS, resumes=True)

    with pytest.raises(DamagedFileError, match=f"{name} is damaged"):
        resume()
    assert DAMAGE[name] is None or (folder / name).read_bytes() == DAMAGE[name]
    assert not (folder / "report.html").exists()


def test_a_run_resumes_without_its_side_files(runs, caplog):
    folder = copytree(runs / "whole", runs / "bare of side files")
    for name in (*DAMAGE, "report.html"):
        (folder / name).unlink()
    assert len(run(runs, folder.name, *OPTIONS, resumes=True).after) == 2
    assert read_run(folder).history == read_run(runs / "whole").history[-1:]  # from the checkpoint
    assert "metrics.csv" in caplog.text


def test_a_config_of_gigabytes_is_one_line(runs, tmp_path):
    folder = copytree(runs / "whole", tmp_path / "damaged")
    os.truncate(folder / "config.yaml", 6 * 2**30)  # sparse: it takes no space
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        evaluate(scoring(folder))


def test_a_damaged_run_is_scored_and_its_export_names_the_file(runs, tmp_path):
    folder = copytree(runs / "whole", tmp_path / "damaged")
    damage(folder / "evaluation.json")
    assert len(evaluate(scoring(folder)).rows) == 2
    with pytest.raises(ValueError, match=r"evaluation\.json is damaged"):
        export(convert(ExportConfig, {"ckpt": str(folder), "to": str(tmp_path / "out")}))
    assert not (tmp_path / "out").exists()


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
        says = rf"has no checkpoint {name}; .*iteration-000002$"
        with pytest.raises(ConfigError, match=says):
            find_run(checkpoints / name)


def test_a_copied_checkpoint_is_found_by_its_own_name(runs, tmp_path):
    folder = copytree(runs / "whole", tmp_path / "copied")
    (folder / "checkpoints" / "iteration-000001").rename(folder / "checkpoints" / "iteration-2")
    assert find_run(folder / "checkpoints" / "iteration-2").iteration == 1


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_by_itself(runs):
    folder = copytree(runs / "whole", runs / "bare")
    (folder / "report.html").unlink()
    rmtree(folder / "checkpoints")
    metrics = (folder / "metrics.csv").read_bytes()
    with pytest.raises(ConfigError, match=r"no checkpoint.*metrics\.csv"):
        run(runs, "bare", *OPTIONS, resumes=True)
    assert (folder / "metrics.csv").read_bytes() == metrics
    (folder / "metrics.csv").unlink()
    run(runs, "bare", *OPTIONS, resumes=True)
    assert [row["iteration"] for row in read_run(folder).history] == [1, 2]
