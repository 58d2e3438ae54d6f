"""Sweeps from the command line: the files that ship, and real runs that fail, are killed or interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from rich.console import Console

from lit_rlkv.config import ConfigError
from lit_rlkv.runs.context import CHECKPOINTS
from lit_rlkv.runs.lock import FolderLock
from lit_rlkv.runs.resume import is_done
from lit_rlkv.sweep import main
from lit_rlkv.sweeping.arguments import parse
from lit_rlkv.sweeping.command import check_folder, folder_name, run_sweep
from lit_rlkv.sweeping.job import LOCK, FitJob, is_locked
from lit_rlkv.sweeping.plan import Plan, check_plan, first_config
from lit_rlkv.sweeping.sweep_file import n_runs, read_sweep
from tests.sweeping.files import BAYES, COMMAND, GRID, plan_of, with_parameters, write
from tests.whole_runs import TINY

ROOT = Path(__file__).parent.parent
SHIPPED = sorted((ROOT / "sweeps").glob("*.yaml"))
SWEPT = ("cache.budget", "evaluation.budgets")
SMALL = [option for option in TINY if not option.startswith(SWEPT)]
SMALL += ["evaluation.budgets=[]", "diagnostics=none"]
N_ITERATIONS = 5
RUNS = with_parameters(
    GRID,
    seed={"values": [0, 1]},
    cache__budget={"values": [5, 7]},
    sft__seed={"value": 0},  # one SFT model for all
    algorithm__n_iterations={"value": N_ITERATIONS},
)


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_combination_of_a_shipped_file_composes_and_passes_the_checks(path):
    plan = Plan(read_sweep(path))
    check_plan(plan)
    assert first_config(plan).logger is None  # offline runs need no W&B
    assert n_runs(plan.sweep) >= 10


def test_shipped_files_name_their_claim_and_start_fit_by_overrides():
    assert {path.stem for path in SHIPPED} >= {"arms", "distillation", "policies", "roles", "learning_rate"}
    for path in SHIPPED:
        assert path.read_text().startswith("# Claim: "), path
        source = yaml.safe_load(path.read_text())
        assert source["command"] == COMMAND, path
        assert source["parameters"]["logger"] == {"value": "wandb"}, (
            path
        )  # else W&B's agents would see nothing


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("cache.budget:", "cache.buget:", "unknown key 'cache.buget': did you mean 'cache.budget'"),
        ("sparse_rl, shadow", "sparse_lr, shadow", "experiment must be one of .*, got sparse_lr"),
        ("[12, 14, 16]", "[4, 14, 16]", "got 4; raise the budget"),
    ],
)
def test_a_mistake_in_a_shipped_file_would_be_found(tmp_path, was, now, says):
    text = (ROOT / "sweeps" / "arms.yaml").read_text()
    assert text.count(was) == 1
    (tmp_path / "arms.yaml").write_text(text.replace(was, now))
    with pytest.raises(ConfigError, match=says):
        check_plan(Plan(read_sweep(tmp_path / "arms.yaml")))


def start(path, folder, overrides):
    """A sweep in a process of its own."""
    program = [sys.executable, "-m", "lit_rlkv.sweep", str(path), "--jobs", "2", "--dir", str(folder)]
    return subprocess.Popen(
        [*program, *overrides, f"runs_dir={folder.parent}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def run_here(folder, content):
    """The same sweep in this process."""
    plan = plan_of(folder.parent, content, *SMALL, f"runs_dir={folder.parent}")
    return run_sweep(plan, folder, n_runs(plan.sweep), 2, Console(quiet=True))


def runs_of(folder):
    return sorted(path for path in folder.glob("0*") if path.is_dir())


def wait_until(is_true, timeout_s=180):
    deadline = time.monotonic() + timeout_s
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_true()


def half_done(folder):
    """Runs that have left a checkpoint and are under way."""
    return [run for run in runs_of(folder) if any((run / CHECKPOINTS).glob("*")) and not is_done(run)]


def kill(run):
    os.kill(int((run / LOCK).read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_sweep_goes_on_without_repeating_a_finished_run(tmp_path):
    folder = tmp_path / "sweep"
    sweep = start(write(tmp_path, RUNS), folder, SMALL)
    wait_until(lambda: any(map(is_done, runs_of(folder))) and half_done(folder))
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    cut = half_done(folder)[0]
    orphans = [run for run in runs_of(folder) if is_locked(run) and run != cut]
    kill(cut)  # one run dies with the sweep, and any other lives on
    finished = {run: (run / "report.html").stat().st_mtime_ns for run in runs_of(folder) if is_done(run)}
    assert finished

    assert run_here(folder, RUNS) == []
    assert len(runs_of(folder)) == 4
    assert all(map(is_done, runs_of(folder)))
    for run, written_at in finished.items():
        assert (run / "report.html").stat().st_mtime_ns == written_at, run
    assert [n_starts(run) for run in runs_of(folder)] == [
        2 if run == cut else 1 for run in runs_of(folder)
    ], orphans
    rows = (cut / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == [f"{n}.0" for n in range(1, N_ITERATIONS + 1)]
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert sorted((row["values"]["seed"], row["values"]["cache.budget"]) for row in results) == [
        (0, 5), (0, 7), (1, 5), (1, 7),
    ]  # fmt: skip
    assert all(row["state"] == "finished" and "eval/accuracy" in row["metrics"] for row in results)
    assert (folder / "sweep.png").is_file()
    # One run made the SFT model, and the others waited for it.
    assert sum((run / "sft_metrics.csv").is_file() for run in runs_of(folder)) == 1


def n_starts(run):
    """Return the number of starts of fit in this folder."""
    text = (run / "output.log").read_text()
    return text.count("start from the SFT model of") + text.count("supervised fine-tuning")


@pytest.mark.slow
def test_a_failure_is_reported_and_stops_nobody_and_an_interrupt_stops_all(tmp_path):
    folder = tmp_path / "sweep"
    # That so long a response has no positions left is known to the model alone, so this run ends by itself.
    content = with_parameters(
        GRID, rollout__max_new_tokens={"values": [5000, 8]}, algorithm__n_iterations={"value": 10_000}
    )
    own = [option for option in SMALL if "max_new_tokens" not in option]
    sweep = start(write(tmp_path, content), folder, own)
    wait_until(lambda: [is_locked(run) for run in runs_of(folder)] == [False, True])
    sweep.send_signal(signal.SIGINT)
    said = sweep.communicate(timeout=60)[1].decode()
    assert sweep.returncode == 130
    assert "run 0 failed: rollout.max_new_tokens=5000" in said
    assert "has positions for 1024" in said
    assert f"interrupted; resume with python -m lit_rlkv.sweep {tmp_path}" in said
    assert "Traceback" not in said
    assert not any(map(is_locked, runs_of(folder)))


@pytest.mark.parametrize(
    ("content", "arguments", "says"),
    [
        (
            GRID | {"method": "annealing"},
            [],
            "error: method must be one of grid, random, bayes, got annealing",
        ),
        (BAYES | {"run_cap": None}, [], "error: method=bayes never ends by itself"),
        (GRID, ["seed=3"], "error: seed=3: the sweep itself varies seed"),
        (GRID, ["--wandb"], "error: --wandb needs an account"),
        (GRID, ["--wandb", "--dir", "x"], "error: --dir=x has no effect with --wandb"),
        # before the grid is checked, which has a mistake of its own
        (
            with_parameters(cache__budget={"values": [16, 4]}),
            ["--dir", "sweep.yaml/x"],
            "error: the sweep would",
        ),
    ],
)
def test_a_mistake_is_one_line_before_any_run(tmp_path, monkeypatch, content, arguments, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["sweep", str(write(tmp_path, content)), *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert str(caught.value).startswith(says)
    assert not (tmp_path / "runs").exists()


def test_options_and_overrides_may_stand_in_any_order_and_counts_are_counts(capsys):
    args = parse(["x.yaml", "a=1", "--jobs", "3", "b=2", "--max-runs", "5"])
    assert (str(args.file), args.overrides, args.jobs, args.max_runs) == ("x.yaml", ["a=1", "b=2"], 3, 5)
    with pytest.raises(SystemExit):
        parse(["x.yaml", "--jobs", "0"])
    assert "must be a whole number of at least 1, got 0" in capsys.readouterr().err


def test_other_overrides_are_another_sweep_in_another_folder(tmp_path):
    path = Path("sweeps/arms.yaml")
    names = {
        folder_name(path, plan_of(tmp_path, GRID, *overrides))
        for overrides in ([], ["task=recall"], ["task=sorting"], [*SMALL, "task.max_operand=8"], SMALL)
    }
    orders = (["task=recall", "algorithm=rloo"], ["algorithm=rloo", "task=recall"])
    assert len({folder_name(path, plan_of(tmp_path, GRID, *order)) for order in orders}) == 1
    assert len(names) == 5
    assert {"arms", "arms-task_recall"} <= names
    assert max(map(len, names)) < 100


def test_a_folder_has_one_sweep_at_a_time(tmp_path):
    plan = plan_of(tmp_path, GRID)
    with FolderLock() as lock:
        lock.take(tmp_path)
        with pytest.raises(ConfigError, match=r"is at work there; .* \(--dir=\.\.\.\)"):
            run_sweep(plan, tmp_path, 4, 1, Console(quiet=True))


def test_a_run_whose_process_was_never_started_is_no_run(tmp_path):
    assert not FitJob(tmp_path).is_running


def test_a_missing_optuna_is_told_before_the_grid_is_checked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    content = with_parameters(cache__budget={"values": [16, 4]})  # a mistake that a check would find
    monkeypatch.setattr("sys.argv", ["sweep", str(write(tmp_path, content)), f"runs_dir={tmp_path}"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert str(caught.value) == (
        'error: sweeps need the package optuna, which is missing; pip install -e ".[sweep]"'
    )


def test_a_folder_that_cannot_be_written_is_refused_and_none_is_made(tmp_path):
    check_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "b"):
        with pytest.raises(ConfigError, match=r"which cannot be written: .*; give another --dir"):
            check_folder(folder)


def test_the_directions_of_the_distillation_differ_in_nothing_else(tmp_path):
    plan = Plan(read_sweep(ROOT / "sweeps" / "distillation.yaml"))
    found = [
        plan.compose(values, tmp_path).cfg
        for values in plan.combinations()
        if (values["seed"], values["distillation.weight"]) == (0, 1.0)
    ]
    found = [OmegaConf.to_container(cfg) for cfg in found]
    assert {cfg["distillation"].pop("direction") for cfg in found} == {"sparse_student", "dense_student"}
    assert found[0] == found[1]


def test_the_anchored_arms_differ_in_their_correction_alone_and_have_the_anchor_of_smd(tmp_path):
    plan = Plan(read_sweep(ROOT / "sweeps" / "arms_anchored.yaml"))
    smd = Plan(read_sweep(ROOT / "sweeps" / "arms.yaml")).compose({"experiment": "smd"}, tmp_path).cfg
    for values in plan.combinations():
        if (values["seed"], values["cache.budget"]) == (0, 12):
            distillation = plan.compose(values, tmp_path).cfg.distillation
            assert (distillation.weight, distillation.anchor_weight) == (0.0, 1.0), values
            assert distillation.teacher == smd.distillation.teacher
    assert smd.distillation.anchor_weight == 1.0
