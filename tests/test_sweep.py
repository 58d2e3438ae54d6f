"""Sweeps from the command line: real runs that fail, are killed or interrupted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from lit_rlkv.run_files import CHECKPOINTS
from lit_rlkv.runs.resume import is_done
from lit_rlkv.sweep import main, parse
from lit_rlkv.sweeping.runs import SweepStudy, Workers
from lit_rlkv.sweeping.sweep_file import read_sweep
from tests.sweeping.files import GRID, with_parameters, write
from tests.whole_runs import TINY

ROOT = Path(__file__).parent.parent
SMALL = [option for option in TINY if not option.startswith(("cache.budget", "evaluation.budgets"))]
N_ITERATIONS = 5
SMALL += ["evaluation.budgets=[]", "diagnostics=none", f"algorithm.n_iterations={N_ITERATIONS}"]
RUNS = with_parameters(
    GRID,
    seed={"values": [0, 1]},
    cache__budget={"values": [5, 7]},
    sft__seed={"value": 0},  # one SFT model for all
)


def start(path, folder, overrides):
    """A sweep in a process of its own."""
    program = [sys.executable, "-m", "lit_rlkv.sweep", str(path), "--jobs", "2", "--dir", str(folder)]
    return subprocess.Popen(
        [*program, *overrides, f"runs_dir={folder.parent}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_here(folder, content):
    """The same sweep in this process; returns the runs that failed."""
    sweep = read_sweep(write(folder.parent, content), (*SMALL, f"runs_dir={folder.parent}"))
    workers = Workers(SweepStudy(sweep, folder, sweep.n_runs()), 2, Console(quiet=True))
    workers.run()
    return workers.failed


def runs_of(folder):
    return sorted(path for path in folder.glob("0*") if path.is_dir())


def trained_at(run):
    return (run / f"{CHECKPOINTS}/iteration-{N_ITERATIONS:06d}/trainable.safetensors").stat().st_mtime_ns


def n_starts(run):
    return run.with_suffix(".log").read_text().count("loading torch")


def wait_until(is_true, timeout_s=180):
    deadline = time.monotonic() + timeout_s
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_true()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_goes_on_without_repeating_a_finished_run(tmp_path, number):
    folder = tmp_path / "sweep"
    sweep = start(write(tmp_path, RUNS), folder, SMALL)
    wait_until(lambda: any(map(is_done, runs_of(folder))) and not all(map(is_done, runs_of(folder))))
    sweep.send_signal(number)
    _, said = sweep.communicate(timeout=60)
    assert sweep.returncode == 130
    assert "resume with python -m lit_rlkv.sweep" in said
    # A process may have been ending when the signal came: it starts again, and has nothing left to train.
    finished = {run: trained_at(run) for run in runs_of(folder) if is_done(run)}
    assert run_here(folder, RUNS) == []
    assert len(runs_of(folder)) == 4
    assert all(map(is_done, runs_of(folder)))
    assert {run: trained_at(run) for run in finished} == finished
    for run in runs_of(folder):
        rows = (run / "metrics.csv").read_text().splitlines()
        assert [row.split(",")[0] for row in rows[1:]] == [f"{n}.0" for n in range(1, N_ITERATIONS + 1)]


@pytest.mark.slow
def test_runs_that_fail_are_named_and_tried_again(tmp_path):
    folder, reward = tmp_path / "sweep", tmp_path / "reward.py"
    reward.write_text("def score(**_):\n    raise RuntimeError('broken')\n")
    own = ["reward=python", f"reward.functions.custom.path={reward}:score", f"trusted_modules=['{reward}']"]
    sweep = start(write(tmp_path, RUNS), folder, [*SMALL, *own])
    _, said = sweep.communicate(timeout=300)
    assert sweep.returncode == 1
    assert "4 of 4 runs failed" in said
    reward.write_text("def score(completion, answer):\n    return 0.5\n")
    again = start(write(tmp_path, RUNS), folder, [*SMALL, *own])
    _, said = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert all(map(is_done, runs_of(folder)))


@pytest.mark.slow
def test_two_sweeps_in_one_folder_are_refused(tmp_path):
    folder = tmp_path / "sweep"
    first = start(write(tmp_path, RUNS), folder, SMALL)
    wait_until(lambda: (folder / ".lock").exists())
    second = start(write(tmp_path, RUNS), folder, SMALL)
    _, said = second.communicate(timeout=120)
    assert second.returncode == 1
    assert "at work there" in said
    os.kill(first.pid, signal.SIGTERM)
    first.communicate(timeout=60)


def test_overrides_may_stand_anywhere_and_mistakes_are_one_line(capsys):
    args = parse(["arms", "seed=1", "--jobs", "2", "task=sorting"])
    assert (args.file, args.overrides, args.jobs) == (Path("arms"), ["seed=1", "task=sorting"], 2)
    for wrong in (["arms", "task"], ["arms", "--jobs", "0"], ["arms", "--jbos", "2"], []):
        with pytest.raises(SystemExit) as error:
            parse(wrong)
        assert error.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_missing_file_names_those_that_ship(monkeypatch):
    monkeypatch.setattr("sys.argv", ["sweep", "nosuch.yaml"])
    with pytest.raises(SystemExit, match="arms_anchored"):
        main()
