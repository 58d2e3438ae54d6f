"""Scoring a saved run: caches, samples, intervals, and what is refused before any work."""

import json
import shutil
import sys

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from lit_rlkv.cli import compose_arguments
from lit_rlkv.config import ConfigError, parse
from lit_rlkv.config.commands import EvaluateConfig
from lit_rlkv.config.options import convert
from lit_rlkv.evaluate import evaluate, main
from lit_rlkv.fit import fit
from lit_rlkv.runs.checkpoint import Checkpoint
from lit_rlkv.runs.open_run import find_run
from lit_rlkv.runs.preflight import checked_config
from tests.forks import ended
from tests.runs.test_checkpoint import files_of_at_most
from tests.whole_runs import config, run


@pytest.fixture(scope="module")
def saved(tmp_path_factory, share_sft_model):
    """The folder of a run that has been trained for two iterations."""
    folder = tmp_path_factory.mktemp("runs")
    share_sft_model(config(folder))
    run(folder, "run", "stages=[rl]", "diagnostics=none", "evaluation.n_prompts=6")
    return folder / "run"


def asking(ckpt, **options):
    return convert(EvaluateConfig, {"ckpt": str(ckpt), **options})


def test_every_policy_is_scored_at_every_budget(saved):
    found = evaluate(asking(saved, budgets=[4], policies=["streaming", "snapkv"], batch_size=4))
    labels = [row.cache for row in found.rows]
    policies = ["streaming 7+2", "streaming 4+2", "snapkv 7+2", "snapkv 4+2"]
    assert labels == ["dense", "random 7+2", *policies]
    assert len({row.kl for row in found.rows}) == 6
    assert max(row.replay_gap for row in found.rows) < 1e-4


def test_a_policy_named_twice_and_dense_are_scored_once(saved):
    found = evaluate(asking(saved, budgets=[], policies=["dense", "tova", "tova"], n_prompts=2))
    assert [row.cache for row in found.rows] == ["dense", "random 7+2", "tova 7+2"]


def test_several_samples_give_pass_at_k_with_intervals(saved):
    found = evaluate(asking(saved, budgets=[], n_samples=4, pass_at_k=[1, 4], temperature=1.5, n_prompts=5))
    assert len(found.samples) == 2 * 5 * 4
    for row, estimates in found.scored:
        assert estimates.accuracy.value == pytest.approx(row.accuracy)
        assert estimates.mean_length.low <= row.mean_length <= estimates.mean_length.high
        assert estimates.pass_at_k[1].value <= estimates.pass_at_k[4].value
    assert found.settings["temperature"] == 1.5
    assert found.settings["n_prompts"] == 5


def test_an_earlier_checkpoint_and_a_run_are_both_found(saved):
    first = evaluate(asking(saved / "checkpoints" / "iteration-000001", n_prompts=2, budgets=[]))
    assert first.run_dir == saved
    assert (first.settings["iteration"], first.settings["checkpoint"]) == (1, "iteration-000001")
    assert evaluate(asking(saved, n_prompts=2, budgets=[])).settings["iteration"] == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ckpt": "nothing"}, "is neither a run folder"),
        ({"pass_at_k": [4]}, "pass@4 cannot be estimated from n_samples=1; give k from 1 to n_samples"),
        ({"pass_at_k": [0]}, r"pass_at_k\[0\] must be a whole number of at least 1, got 0"),
        ({"pass_at_k": 4}, r"pass_at_k must be a list.* write pass_at_k=\[4\]"),
        ({"reward": {"accuracy": "custom"}}, r"accuracy must name one of the functions \(none\)"),
        ({"n_samples": 4}, r"n_samples=4 responses at temperature=0\.0 are 4 times the same one"),
        ({"n_samples": 0}, "n_samples must be a whole number of at least 1, got 0"),
        ({"policies": "snapkv"}, r"policies must be a list, each a text or null, got snapkv"),
        (
            {"policies": ["snapvk"]},
            r"policies: unknown cache policy 'snapvk' \(did you mean snapkv",
        ),
        ({"budgets": 4}, "budgets must be a list, each a whole number of at least 1 or null, got 4"),
        ({"budgets": [4.5]}, r"budgets\[0\] must be a whole number of at least 1, got 4\.5"),
        ({"budgets": [2]}, r"budgets: budget must be at least sink \+ window \+ 1 = 4, got 2"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1 or null, got 0"),
        ({"temperature": -1}, "temperature must be a number of at least 0 and at most 1000000 or null"),
        ({"level": 95}, "level must be a number above 0 and below 1, got 95"),
        ({"name": "../evaluation"}, "name must be a plain file name, got ../evaluation"),
        ({"name": "evaluation"}, "name=evaluation: the run keeps evaluation.json itself"),
        ({"name": "choices"}, "name=choices: the run keeps choices.json itself"),
        ({"name": "evictions"}, "name=evictions: the run keeps evictions.json itself"),
        ({"kernels": "cuda"}, "kernels must be one of auto, reference, triton or null, got cuda"),
    ],
)
def test_a_bad_value_is_refused_before_anything_is_loaded(saved, monkeypatch, options, says):
    monkeypatch.setattr("lit_rlkv.runs.open_run.open_run", lambda run: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=says):
        evaluate(asking(**{"ckpt": saved, **options}))


@pytest.mark.parametrize("place", ["task", "algorithm.loss", "diagnostics.cache", "reward.functions.mine"])
def test_a_saved_config_may_only_name_trusted_targets(saved, tmp_path, place):
    shutil.copytree(saved, tmp_path / "run", symlinks=True)
    path = tmp_path / "run" / "config.yaml"
    cfg = OmegaConf.load(path)
    OmegaConf.update(cfg, place, {"_target_": "os.mkdir", "path": str(tmp_path / "made")}, force_add=True)
    OmegaConf.save(cfg, path)
    with pytest.raises(ConfigError, match=r"os\.mkdir.* is not from a trusted package"):
        evaluate(asking(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"os\.mkdir.* is not from a trusted package"):
        fit(checked_config(cfg), tmp_path / "run", Console(quiet=True), resumes=True)
    assert not (tmp_path / "made").exists()


def test_evaluate_survives_that_its_checkpoint_is_deleted_before_loading(saved, tmp_path, monkeypatch):
    expected = evaluate(asking(saved, n_prompts=2, budgets=[]))
    shutil.copytree(saved, tmp_path / "run")

    def found_too_late(ckpt):
        found = find_run(ckpt)
        shutil.rmtree(found.checkpoint.path)
        return found

    monkeypatch.setattr("lit_rlkv.runs.open_run.find_run", found_too_late)
    found = evaluate(asking(tmp_path / "run", n_prompts=2, budgets=[]))
    assert found.rows == expected.rows
    assert found.settings["iteration"] == 2


def test_find_run_looks_again_when_the_newest_checkpoint_is_deleted_before_reading(
    saved, tmp_path, monkeypatch
):
    shutil.copytree(saved, tmp_path / "run")
    read = Checkpoint.weights

    def discarded(self):
        monkeypatch.undo()
        shutil.rmtree(self.path)
        return read(self)

    monkeypatch.setattr(Checkpoint, "weights", discarded)
    assert find_run(tmp_path / "run").iteration == 1


@pytest.mark.parametrize("policies", [None, ["dense"]])
def test_budgets_are_refused_where_no_policy_evicts(saved, tmp_path, monkeypatch, policies):
    shutil.copytree(saved, tmp_path / "run")
    cfg = OmegaConf.load(tmp_path / "run" / "config.yaml")
    if policies is None:
        cfg.cache.policy, cfg.distillation = "dense", None
    OmegaConf.save(cfg, tmp_path / "run" / "config.yaml")
    monkeypatch.setattr("lit_rlkv.runs.open_run.open_run", lambda run: pytest.fail("the model was loaded"))
    says = r"budgets=\[5, 7\] need an evicting policy, .* add policies=\[snapkv\]"
    with pytest.raises(ConfigError, match=says):
        evaluate(asking(tmp_path / "run", policies=policies, budgets=[5, 7]))


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_loaded(saved, monkeypatch):
    monkeypatch.setattr("lit_rlkv.runs.open_run.open_run", lambda run: pytest.fail("the model was loaded"))
    with (
        files_of_at_most(0),
        pytest.raises(ConfigError, match=r"got File too large; copy the run"),
    ):
        evaluate(asking(saved))


@pytest.mark.slow
def test_results_that_cannot_be_written_are_shown(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "run" / "evaluate.json").mkdir()
    code, said = ended(main, f"ckpt={tmp_path / 'run'}", "budgets=[]", "n_prompts=2")
    assert code == 1
    assert "random 7+2" in said
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith("error: the results cannot be written: [Errno 21] Is a directory")


def test_the_command_line_prints_the_table_and_writes_result_and_samples(saved):
    code, said = ended(
        main, f"ckpt={saved}", "budgets=[4]", "n_samples=2", "pass_at_k=[1,2]", "temperature=1", "n_prompts=3"
    )
    assert code == 0, said
    assert "random 4+2" in said
    assert "3 prompts × 2 samples" in said
    result = json.loads((saved / "evaluate.json").read_text())
    assert [row["budget"] for row in result["rows"]] == [None, 7, 4]
    assert result["environment"]["packages"]["torch"]
    lines = [json.loads(line) for line in (saved / "evaluate_samples.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 3 * 2
    assert lines[0].keys() == {
        "cache", "problem", "sample", "prompt", "answer", "completion", "n_tokens", "score", "reward",
    }  # fmt: skip
    for row in result["rows"]:
        scores = [line["score"] for line in lines if line["cache"] == row["cache"]]
        estimates = row["estimates"]
        assert sum(scores) / len(scores) == pytest.approx(row["accuracy"])
        assert estimates["pass_at_k"]["1"]["value"] == pytest.approx(row["accuracy"])
        assert estimates["accuracy"]["low"] <= row["accuracy"] <= estimates["accuracy"]["high"]


def test_perplexity_of_texts_is_shown_and_written_for_each_cache(saved, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "12+3+4+5+6=30"}\n{"text": "7+1+2+9=19"}\n')
    code, said = ended(
        main, f"ckpt={saved}", "budgets=[4]", "n_prompts=2", f"perplexity={path}", "name=texts"
    )
    assert code == 0, said
    result = json.loads((saved / "texts.json").read_text())
    found = [row["perplexity"] for row in result["rows"]]
    assert len({*found}) == 3
    assert "Perplexity" in said
    assert all(f"{each:.4g}" in said for each in found)
    assert result["perplexity"] == str(path)


def test_texts_that_cannot_be_scored_are_refused_before_the_model_is_loaded(saved, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_rlkv.runs.open_run.make_policy", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=r"evaluation\.perplexity: .*none\.jsonl"):
        evaluate(asking(saved, perplexity=str(tmp_path / "none.jsonl")))
    code, said = ended(main, f"ckpt={saved}", f"perplexity={tmp_path}/none.jsonl")
    assert code == 1
    assert "error: perplexity: '" in said
    (tmp_path / "short.jsonl").write_text('{"text": "1"}\n')
    with pytest.raises(ConfigError, match=r"perplexity: .*short\.jsonl:1: the text '1' has 1 tokens"):
        evaluate(asking(saved, perplexity=str(tmp_path / "short.jsonl")))


def test_a_mistake_on_the_command_line_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["evaluate", "ckpt=x", "policy=snapkv"])
    with pytest.raises(SystemExit, match=r"^error: unknown key 'policy'; it takes .*policies"):
        main()


def test_evaluate_without_a_checkpoint_is_refused():
    with pytest.raises(ConfigError, match=r"ckpt must be given; add ckpt=\.\.\."):
        parse(EvaluateConfig, compose_arguments("evaluate", [])[0])
