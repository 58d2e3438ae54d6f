"""Invariant 8: runs that are killed, interrupted or damaged resume where they were, bit for bit on a CPU."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import copytree, rmtree

import pytest
from safetensors.torch import load_file, save_file

from lit_rlkv.config import ConfigError
from lit_rlkv.config.resumed import read_config
from lit_rlkv.evaluate import evaluate
from lit_rlkv.evaluation.results import Results
from lit_rlkv.fit import main
from lit_rlkv.interrupts import REQUEUE as EXIT_CODE
from lit_rlkv.runs.resume import is_done
from tests.forks import ended
from tests.killed_run import run_killed
from tests.tiers import slow
from tests.whole_runs import TINY, rows_of, run, said_by, scoring

ROOT = Path(__file__).parent.parent
OPTIONS = ["stages=[rl]", "callbacks.checkpoint_every=1", "callbacks.samples_every=9", "diagnostics=none"]


def seconds_of(folder, stage):
    return json.loads((folder / "evaluation.json").read_text())["stage_seconds"][stage]


def assert_same_run(folder, straight):
    """All that was computed, and what training left."""
    ours, theirs = rows_of(folder), rows_of(straight)
    names = [name for name in theirs[0] if not name.startswith("time/") and name != "tokens_per_second"]
    assert {"loss", "reward", "grad_norm", "skipped_steps"} <= set(names)
    for name in names:
        assert [row[name] for row in ours] == [row[name] for row in theirs], name
    last = f"checkpoints/iteration-{len(theirs):06d}/trainable.safetensors"
    assert (folder / last).read_bytes() == (straight / last).read_bytes()


@pytest.mark.parametrize(
    ("algorithm", "n_kills", "n_iterations"),
    [("grpo", 2, 14), slow("grpo", 20, 140), slow("ppo", 3, 40), slow("online_dpo", 3, 40)],
)
def test_a_run_killed_at_random_moments_resumes_bit_for_bit(sft_runs, algorithm, n_kills, n_iterations):
    # The record of what top_p leaves is saved nowhere: an iteration that was cut off is sampled again.
    options = [
        *OPTIONS,
        "rollout.top_p=0.9",
        f"algorithm={algorithm}",
        f"algorithm.n_iterations={n_iterations}",
    ]
    straight, folder = (sft_runs / f"{kind}-{algorithm}-{n_kills}" for kind in ("straight", "killed"))
    run(sft_runs, straight.name, *options)
    n_done = run_killed(sft_runs, folder.name, n_kills, *options)
    assert len(n_done) == n_kills
    assert 0 < n_done[0] < n_done[-1] < n_iterations
    assert seconds_of(folder, "rl") >= float(rows_of(folder)[-1]["time/wall_clock_s"])
    assert_same_run(folder, straight)


def start(*arguments):
    command = [sys.executable, "-m", "lit_rlkv.fit", *TINY, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(path):
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.slow
def test_a_run_that_gets_sigterm_saves_and_the_same_command_resumes_it(sft_runs):
    options = [*OPTIONS, "callbacks.checkpoint_every=100", "algorithm.n_iterations=40"]
    run(sft_runs, "straight", *options)
    folder = sft_runs / "asked"
    arguments = [*options, f"runs_dir={sft_runs}", f"hydra.run.dir={folder}", "resume=auto"]
    process = start(*arguments)
    wait_for(folder / "metrics.csv")
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    said = said_by(process)
    assert process.returncode == EXIT_CODE, said
    assert "asked to end by SIGTERM: saved" in said
    n_done = len(rows_of(folder))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"iteration-{n_done:06d}"]
    stopped_after_s = seconds_of(folder, "rl")
    assert stopped_after_s >= float(rows_of(folder)[-1]["time/wall_clock_s"])
    process = start(*arguments)
    said = said_by(process)
    assert process.returncode == 0, said
    assert f"resume after iteration {n_done}" in said
    assert seconds_of(folder, "rl") > stopped_after_s
    assert_same_run(folder, sft_runs / "straight")


@pytest.mark.slow
def test_a_second_process_on_one_run_is_refused_with_the_pid_of_the_first(sft_runs):
    folder = sft_runs / "wanted-by-two"
    arguments = [*OPTIONS, "algorithm.n_iterations=4000", f"runs_dir={sft_runs}", f"hydra.run.dir={folder}"]
    both = [start(*arguments, "resume=auto") for _ in range(2)]
    while all(process.poll() is None for process in both):
        time.sleep(0.1)
    refused, works = sorted(both, key=lambda process: process.poll() is None)
    said = said_by(refused)
    assert refused.returncode == 1, said
    assert f"error: {folder}: process {works.pid} on " in said
    while not any(folder.glob("checkpoints/iteration-*")):
        assert works.poll() is None
        time.sleep(0.02)
    works.kill()
    said_by(works)
    code, said = ended(main, f"resume={folder}", "stages=[eval]")
    assert code == 0
    assert "resume after iteration" in said
    assert (folder / "report.html").is_file()
    assert read_config(folder).stages == [
        "rl",
        "eval",
    ]  # it is only looked at, and trains on when it is resumed
    assert not is_done(folder)
    found = json.loads((folder / "evaluation.json").read_text())
    assert len(found["before"]) == len(found["after"]) > 0


@pytest.mark.slow
def test_an_evaluation_with_other_settings_is_repeated_also_before_training(sft_runs, monkeypatch, caplog):
    options = ["stages=[rl,eval]", "diagnostics=none", "evaluation.n_prompts=16"]
    save, n_saves = Results.save, []

    def on_a_full_disk(results, run_dir):
        n_saves.append(run_dir)
        if len(n_saves) < 3:
            raise OSError(28, "No space left on device")
        save(results, run_dir)

    with monkeypatch.context() as patch:
        patch.setattr(Results, "save", on_a_full_disk)
        first = run(sft_runs, "asked-otherwise", *options)
    assert "evaluation.json in" in caplog.text
    assert "No space left" in caplog.text
    again = run(sft_runs, "asked-otherwise", *options, resumes=True)
    assert again.before == first.before
    more = run(sft_runs, "asked-otherwise", *options[:2], "evaluation.n_prompts=24", resumes=True)
    assert {row.n_problems for row in (*more.before, *more.after)} == {24}
    assert {row.n_problems for row in (*first.before, *first.after)} == {16}


def test_a_run_with_a_damaged_checkpoint_resumes_from_the_one_before(sft_runs, caplog):
    options = [*OPTIONS, "algorithm.n_iterations=4"]
    run(sft_runs, "whole", *options)
    copytree(sft_runs / "whole", sft_runs / "damaged")
    weights = sft_runs / "damaged" / "checkpoints" / "iteration-000004" / "trainable.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    run(sft_runs, "damaged", *options, resumes=True)
    assert "iteration-000004/trainable.safetensors has changed since it was written" in caplog.text
    assert_same_run(sft_runs / "damaged", sft_runs / "whole")


def test_a_budget_that_is_steered_resumes_where_it_was(sft_runs):
    # The overlap of a barely trained model is above 0.95, so the budget falls in every iteration.
    steered = ["cache.target_overlap=0.9", "cache.budget_bounds=[4,12]", "cache.budget=12"]
    measure = "+diagnostics.mismatch={_target_: lit_rlkv.callbacks.mismatch.DenseMismatch, every: 1}"
    options = [*OPTIONS, *steered, measure, "algorithm.n_iterations=4"]
    run(sft_runs, "steered", *options)
    budgets = [float(row["kv/budget"]) for row in rows_of(sft_runs / "steered")]
    assert budgets == [12, 11, 10, 9]
    copytree(sft_runs / "steered", sft_runs / "steered_again")
    rmtree(sft_runs / "steered_again" / "checkpoints" / "iteration-000004")
    run(sft_runs, "steered_again", *options, resumes=True)
    assert_same_run(sft_runs / "steered_again", sft_runs / "steered")


def test_a_full_disk_costs_a_warning_and_the_next_iteration_is_saved(sft_runs, monkeypatch, caplog):
    import lit_rlkv.runs.checkpoint as module

    write, written = module.save_file, []

    def full_at_first(weights, path):
        written.append(path)
        if len(written) == 1:
            raise OSError(28, "No space left on device")
        write(weights, path)

    monkeypatch.setattr(module, "save_file", full_at_first)
    run(sft_runs, "full", *OPTIONS, "algorithm.n_iterations=3", "callbacks.checkpoint_every=2")
    assert "iteration 2 cannot be saved" in caplog.text
    assert "No space left on device" in caplog.text
    assert [path.name for path in (sft_runs / "full" / "checkpoints").iterdir()] == ["iteration-000003"]
    monkeypatch.setattr(module, "save_file", lambda *args: full_at_first(*args) or written.clear())
    written.clear()
    with pytest.raises(OSError, match="there is no checkpoint to resume from"):
        run(sft_runs, "full-at-the-end", *OPTIONS, "algorithm.n_iterations=1")


def test_the_best_checkpoint_by_the_configured_metric_is_kept(sft_runs):
    options = [*OPTIONS, "algorithm.n_iterations=6", "callbacks.keep_last=1", "callbacks.keep_best=1"]
    run(sft_runs, "best", *options, "callbacks.best_metric=entropy", "callbacks.best_mode=min")
    entropies = [float(row["entropy"]) for row in rows_of(sft_runs / "best")]
    best = 1 + min(range(6), key=entropies.__getitem__)
    kept = {path.name for path in (sft_runs / "best" / "checkpoints").iterdir()}
    assert kept == {"best", f"iteration-{best:06d}", "iteration-000006"}
    assert (sft_runs / "best" / "checkpoints" / "best").resolve().name == f"iteration-{best:06d}"


@pytest.mark.slow
def test_settings_that_may_change_on_resume_are_saved_in_the_run_folder(sft_runs):
    run(sft_runs, "watched", "stages=[rl]", "algorithm.n_iterations=1")
    folder = sft_runs / "watched"
    given = [f"resume={folder}", "stages=[eval]", "diagnostics=none", "logger=lightning_csv"]
    assert ended(main, *given, f"hydra.run.dir={sft_runs / 'other'}")[0] == 0
    assert (folder / "lightning_csv" / "version_0").is_dir()
    assert "diagnostics: {}" in (folder / "config.yaml").read_text()
    assert not (sft_runs / "other").exists()


def test_resuming_another_run_is_refused_with_the_differences(sft_runs):
    for arguments, says in (
        (["resume=no-such-run"], "error: resume=no-such-run is not a run folder"),
        ([f"resume={sft_runs / 'first'}", "seed=3"], "seed: 0 -> 3"),
    ):
        code, said = ended(main, *arguments)
        assert code == 1
        assert says in said


def test_a_checkpoint_is_refused_on_another_backbone(sft_runs):
    run(sft_runs, "on-its-own", *OPTIONS, "algorithm.n_iterations=1")
    copytree(sft_runs / "on-its-own", sft_runs / "on-others")
    weights = sft_runs / "on-others" / "backbone" / "model.safetensors"
    changed = load_file(weights)
    changed["model.norm.weight"] += 1
    save_file(changed, weights, {"format": "pt"})
    says = "iteration-000001 was trained on other weights than those in"
    with pytest.raises(ConfigError, match=says):
        run(sft_runs, "on-others", *OPTIONS, "algorithm.n_iterations=1", resumes=True)
    with pytest.raises(ConfigError, match=says):
        evaluate(scoring(sft_runs / "on-others"))
