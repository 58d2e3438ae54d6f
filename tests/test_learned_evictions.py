"""Whole runs that train the scorer of their evictions: resumed, on two processes, exported, evaluated."""

from dataclasses import asdict, replace
from pathlib import Path
from shutil import copytree, rmtree

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from lit_rlkv.config import ConfigError
from lit_rlkv.config.commands import ExportConfig
from lit_rlkv.config.options import convert
from lit_rlkv.evaluate import evaluate
from lit_rlkv.export import export
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.kv_scorer import KV_SCORER_FILE, kv_scorer_of, load_kv_scorer
from lit_rlkv.rollout import generate
from lit_rlkv.runs.open_run import find_run, open_run
from lit_rlkv.types import NEVER, Rollout
from tests.whole_runs import config, rows_of, run, run_on_ranks, scoring

LEARNED = [
    *("cache.policy=learned", "stages=[rl]", "diagnostics=none", "algorithm.n_iterations=2"),
    *("evaluation.n_prompts=4", "evaluation.n_mismatch=4"),
    "reward.missing_eos_penalty=1",  # an untrained model solves nothing, but ends some responses
]
LAST = "checkpoints/iteration-000002/trainable.safetensors"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, share_sft_model) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    share_sft_model(config(folder))
    run(folder, "learned", *LEARNED)
    return folder


def scorer_of(folder: Path, checkpoint: str = LAST) -> dict[str, torch.Tensor]:
    weights = load_file(folder / checkpoint)
    return {name.partition("kv_scorer.")[2]: each for name, each in weights.items() if "kv_scorer" in name}


def assert_same_metrics(one: Path, other: Path, rel: float = 0.0) -> None:
    for ours, theirs in zip(rows_of(one), rows_of(other), strict=True):
        for name in [name for name in theirs if name.startswith("eviction/")] + [
            "reward",
            "loss",
            "grad_norm",
        ]:
            assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=rel, abs=rel), name


def test_a_checkpoint_holds_the_scorer_and_a_resumed_run_is_the_same(runs: Path):
    scorer = scorer_of(runs / "learned")
    assert len(scorer) == 2 * 4
    assert float(scorer["layers.0.out"].abs().max()) > 0
    copytree(runs / "learned", runs / "again")
    rmtree(runs / "again" / "checkpoints" / "iteration-000002")
    run(runs, "again", *LEARNED, resumes=True)
    assert (runs / "again" / LAST).read_bytes() == (runs / "learned" / LAST).read_bytes()
    assert_same_metrics(runs / "again", runs / "learned")


@pytest.mark.parametrize("strategy", [[], pytest.param(["fabric.strategy=fsdp2"], marks=pytest.mark.slow)])
def test_two_processes_train_the_scorer_of_one(runs: Path, strategy: list[str]):
    options = [*LEARNED, "rollout.n_shards=2", *strategy]
    one, two = (f"{name}{len(strategy)}" for name in ("one", "two"))
    run(runs, one, *LEARNED, "rollout.n_shards=2")
    run_on_ranks(runs, two, 2, *options)
    assert_same_metrics(runs / two, runs / one, rel=1e-3)
    expected = scorer_of(runs / one)
    for name, found in scorer_of(runs / two).items():
        # Adam magnifies the rounding of another order of sums where a gradient is nearly 0.
        is_apart = (found - expected[name]).abs() > 1e-5 + 1e-3 * expected[name].abs()
        assert is_apart.float().mean() < 0.01, name
        torch.testing.assert_close(found, expected[name], rtol=1e-2, atol=1e-3)


def test_at_weight_zero_the_scorer_stays_and_evictions_are_still_drawn(runs: Path):
    run(runs, "frozen", *LEARNED, "algorithm.eviction.weight=0", "experiment=naive")
    assert scorer_of(runs / "frozen") == {}
    rows = rows_of(runs / "frozen")
    assert not any(name.startswith("eviction/") for name in rows[0])
    assert float(rows[0]["rollout_corr/kl"]) != 0.0


def test_the_scorer_trains_alone_without_a_loss_of_the_tokens(runs: Path, tmp_path: Path):
    run(runs, "alone", *LEARNED, "experiment=shadow", "algorithm.policy_weight=0")
    weights = load_file(runs / "alone" / LAST)
    assert all(float(each.abs().max()) == 0 for name, each in weights.items() if "lora_B" in name)
    scorer = scorer_of(runs / "alone")
    assert float(scorer["layers.1.age"].abs().max()) > 0
    folder, _ = export(convert(ExportConfig, {"ckpt": str(runs / "alone"), "to": str(tmp_path / "model")}))
    assert torch.equal(load_file(folder / KV_SCORER_FILE)["layers.1.age"], scorer["layers.1.age"])


def greedy(model: PreTrainedModel) -> Rollout:
    input_ids = torch.arange(2, 14).view(2, 6)
    return generate(
        model,
        input_ids,
        torch.ones_like(input_ids),
        cache=CacheSpec("learned", budget=7, interval=2, sink=1, window=2),
        max_new_tokens=12,
        eos_token_id=None,
        pad_token_id=0,
        temperature=0.0,
    )


@pytest.mark.parametrize("layout", ["hydra", pytest.param("full", marks=pytest.mark.slow)])
def test_an_export_brings_the_scorer_and_it_evicts_as_in_the_run(runs: Path, tmp_path: Path, layout: str):
    name = "learned"
    if layout == "full":
        name = "whole"
        run(runs, name, *LEARNED, "roles=full")
    folder, _ = export(convert(ExportConfig, {"ckpt": str(runs / name), "to": str(tmp_path / "model")}))
    assert KV_SCORER_FILE in (folder / "README.md").read_text()
    weights = load_file(folder / KV_SCORER_FILE)
    assert all(torch.equal(weights[n], each) for n, each in scorer_of(runs / name).items())

    model = prepare_backbone(AutoModelForCausalLM.from_pretrained(folder))
    load_kv_scorer(model, folder)
    _, module = open_run(find_run(runs / name))
    with acting_as(module.roles, "policy") as policy:
        tables = [greedy(backbone).evicted_at for backbone in (model, policy)]
    assert torch.equal(*tables)
    assert (tables[0] < NEVER).any()
    with pytest.raises(ValueError, match=r"must hold kv_scorer\.safetensors, found none"):
        load_kv_scorer(model, tmp_path)


def test_a_run_starts_from_the_scorer_of_its_starting_model(runs: Path, tmp_path: Path):
    folder, _ = export(convert(ExportConfig, {"ckpt": str(runs / "learned"), "to": str(tmp_path / "model")}))
    started = [*LEARNED, f"model.path={folder}", "algorithm.eviction.weight=0", "optimizer.lr=1e-9"]
    run(tmp_path, "next", *started)
    _, module = open_run(find_run(tmp_path / "next"))
    scorer = kv_scorer_of(module.roles.backbone("policy"))
    assert scorer is not None
    for name, weight in scorer.state_dict().items():
        assert torch.equal(weight, scorer_of(runs / "learned")[name])
    # SFT passes it on with its model.
    run(tmp_path, "tuned", *started, "stages=[sft,rl]")
    _, module = open_run(find_run(tmp_path / "tuned"))
    scorer = kv_scorer_of(module.roles.backbone("policy"))
    assert scorer is not None
    assert torch.equal(scorer.state_dict()["layers.1.age"], scorer_of(runs / "learned")["layers.1.age"])
    with pytest.raises(ConfigError, match="must be of a scorer for"):
        run(tmp_path, "other", *started, "+cache.policy_options.hidden=3")


def test_an_evaluation_draws_no_survivors(runs: Path):
    results = [evaluate(scoring(runs / "learned")) for _ in range(2)]
    assert [asdict(row) for row in results[0].rows] == [asdict(row) for row in results[1].rows]
    assert any("learned" in row.cache for row in results[0].rows)


def test_a_run_without_a_scorer_is_not_evaluated_with_one(runs: Path):
    run(runs, "random", "stages=[rl]", "diagnostics=none", "algorithm.n_iterations=1")
    with pytest.raises(ConfigError, match="this run has trained no scorer for learned; leave it out"):
        evaluate(replace(scoring(runs / "random"), policies=("learned",)))
