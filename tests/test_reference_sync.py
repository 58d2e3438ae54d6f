"""Runs whose reference follows the policy: what they compute, save, resume and export."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lit_rlkv.config.commands import ExportConfig
from lit_rlkv.config.options import convert
from lit_rlkv.evaluate import evaluate
from lit_rlkv.export import export
from lit_rlkv.runs.checkpoint import REFERENCE
from lit_rlkv.runs.open_run import find_run, open_run
from tests.killed_run import run_killed
from tests.test_full_fine_tuning import FULL, KL, PREFIX, start_weights, trained_weights
from tests.test_resume import assert_same_run
from tests.whole_runs import config, rows_of, run, scoring

OPTIONS = [*FULL, KL, "experiment=shadow", "algorithm.lr_schedule=constant"]
EVERY = "algorithm.reference_sync.every"
ALPHA = "algorithm.reference_sync.alpha"
ONE_MINIBATCH = [*OPTIONS, "algorithm.n_minibatches=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, share_sft_model) -> Path:
    """A folder with the SFT model that all runs start from."""
    folder = tmp_path_factory.mktemp("runs")
    share_sft_model(config(folder, *FULL))
    return folder


def kls(folder):
    return [float(row["kl"]) for row in rows_of(folder)]


def checkpoint(folder, iteration):
    return folder / "checkpoints" / f"iteration-{iteration:06d}"


@pytest.fixture(scope="module")
def fixed(runs) -> list[float]:
    """The KL in each iteration of a run without a sync."""
    run(runs, "fixed", *ONE_MINIBATCH, "algorithm.n_iterations=5")
    return kls(runs / "fixed")


def test_the_kl_is_zero_on_the_first_minibatch_after_a_sync_with_alpha_one(runs, fixed):
    run(runs, "synced", *ONE_MINIBATCH, "algorithm.n_iterations=5", f"{EVERY}=2", f"{ALPHA}=1")
    synced = kls(runs / "synced")
    # The policy has moved before iterations 2 to 5, and syncs follow 2 and 4.
    assert [kl < 1e-9 for kl in synced] == [True, False, True, False, True]
    assert [kl < 1e-9 for kl in fixed] == [True, False, False, False, False]
    assert synced[:2] == fixed[:2]


@pytest.mark.slow
def test_a_share_of_the_policy_leaves_a_smaller_kl_than_no_sync(runs, fixed):
    run(runs, "half", *ONE_MINIBATCH, "algorithm.n_iterations=3", f"{EVERY}=2")
    assert 1e-6 < kls(runs / "half")[2] < fixed[2] / 2  # near (1 - 0.6)² of it


@pytest.mark.usefixtures("fixed")
def test_a_checkpoint_holds_the_reference_from_the_first_sync_on_and_never_without(runs):
    run(runs, "saved", *OPTIONS, "callbacks.keep_last=9", "algorithm.n_iterations=4", f"{EVERY}=2")
    kept = [(checkpoint(runs / "saved", i) / REFERENCE).exists() for i in range(1, 5)]
    assert kept == [False, True, True, True]
    assert not [*(runs / "fixed").glob(f"checkpoints/*/{REFERENCE}")]
    start = start_weights(runs / "saved")
    policies = {i: load_file(checkpoint(runs / "saved", i) / "trainable.safetensors") for i in (2, 4)}
    references = {i: load_file(checkpoint(runs / "saved", i) / REFERENCE) for i in (2, 3, 4)}
    for name, value in start.items():
        first = value * (1.0 - 0.6) + 0.6 * policies[2][PREFIX + "policy." + name]
        second = first * (1.0 - 0.6) + 0.6 * policies[4][PREFIX + "policy." + name]
        torch.testing.assert_close(references[2][name], first)
        torch.testing.assert_close(references[4][name], second)
        assert torch.equal(references[3][name], references[2][name])
        assert not torch.allclose(references[4][name], references[2][name], rtol=1e-4, atol=1e-6)


def references(folder, n_iterations):
    return (checkpoint(folder, n_iterations) / REFERENCE).read_bytes()


RESUMED = [*OPTIONS, f"{EVERY}=2", "distillation=anchor"]


@pytest.fixture(scope="module")
def straight(runs) -> Path:
    """The folder of a run without an interruption."""
    run(runs, "straight", *RESUMED, "algorithm.n_iterations=5")
    return runs / "straight"


@pytest.mark.slow
@pytest.mark.parametrize("n_before", [3, 2])
def test_a_run_stopped_between_two_syncs_or_right_after_one_resumes_bit_for_bit(runs, straight, n_before):
    folder = runs / f"resumed-{n_before}"
    run(runs, folder.name, *RESUMED, f"algorithm.n_iterations={n_before}")
    run(runs, folder.name, *RESUMED, "algorithm.n_iterations=5", resumes=True)
    assert_same_run(folder, straight)
    assert references(folder, 5) == references(straight, 5)


@pytest.mark.slow
def test_a_reference_that_is_not_loaded_makes_another_run(runs, straight, monkeypatch):
    monkeypatch.setattr("lit_rlkv.runs.checkpoint.load_reference", lambda roles, weights: None)
    run(runs, "forgetful", *RESUMED, "algorithm.n_iterations=3")
    run(runs, "forgetful", *RESUMED, "algorithm.n_iterations=5", resumes=True)
    with pytest.raises(AssertionError):
        assert_same_run(runs / "forgetful", straight)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "n_kills"), [("grpo", 8), ("ppo", 3)])
def test_a_run_killed_at_random_moments_resumes_bit_for_bit(runs, algorithm, n_kills):
    n_iterations = 12 * n_kills
    options = [*OPTIONS, f"algorithm={algorithm}", f"algorithm.n_iterations={n_iterations}", f"{EVERY}=3"]
    straight, folder = (runs / f"{kind}-{algorithm}-{n_kills}" for kind in ("straight", "killed"))
    run(runs, straight.name, *options)
    assert 0 < run_killed(runs, folder.name, n_kills, *options)[-1] < n_iterations
    assert_same_run(folder, straight)
    assert references(folder, n_iterations) == references(straight, n_iterations)


@pytest.mark.slow
def test_export_and_evaluation_take_the_policy_and_an_opened_run_its_synced_reference(runs, tmp_path):
    run(runs, "used", *OPTIONS, f"{EVERY}=1", "algorithm.n_iterations=2")
    _, module = open_run(find_run(runs / "used"))
    reference = load_file(checkpoint(runs / "used", 2) / REFERENCE)
    own = dict(module.roles.backbone("reference").named_parameters())
    assert all(torch.equal(own[name], value) for name, value in reference.items())
    folder, _ = export(convert(ExportConfig, {"ckpt": str(runs / "used"), "to": str(tmp_path / "model")}))
    trained = trained_weights(runs / "used")
    for name, value in load_file(folder / "model.safetensors").items():
        assert torch.equal(value, trained[f"{PREFIX}policy.{name}"])
        assert not torch.equal(value, reference[name])
    rows = {row.cache: row for row in evaluate(scoring(runs / "used")).rows}
    assert rows["dense"].kl == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_a_run_whose_reference_only_a_callback_of_the_user_reads_can_be_opened(runs, tmp_path):
    anchor = "+user_callbacks.anchor={_target_: lit_rlkv.callbacks.shadow_distillation.ShadowDistillation, "
    anchor += "direction: sparse_student, weight: 0.0, teacher: reference, anchor_weight: 1.0}"
    options = [*FULL, "experiment=shadow", anchor, f"{EVERY}=1", "algorithm.n_iterations=2"]
    run(runs, "own", *options)
    assert (checkpoint(runs / "own", 2) / REFERENCE).exists()
    folder, _ = export(convert(ExportConfig, {"ckpt": str(runs / "own"), "to": str(tmp_path / "model")}))
    assert (folder / "model.safetensors").exists()


@pytest.mark.slow
def test_a_distillation_from_the_reference_follows_it(runs):
    options = [*FULL, "experiment=shadow", "distillation=anchor", "algorithm.n_minibatches=1"]
    options += ["algorithm.n_iterations=2", "correction=dense"]
    run(runs, "followed", *options, f"{EVERY}=1", f"{ALPHA}=1")
    run(runs, "stays", *options)
    followed, stays = ([float(r["smd/anchor/kl"]) for r in rows_of(runs / n)] for n in ("followed", "stays"))
    assert max(followed) < 1e-6 < stays[1]
