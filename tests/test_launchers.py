"""Runs started as users start them on several processes, by the command line."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_rlkv.interrupts import REQUEUE as EXIT_CODE
from lit_rlkv.runs.resume import INTERRUPTED
from tests.whole_runs import TINY, config, said_by

ROOT = Path(__file__).parent.parent
OPTIONS = ["stages=[rl]", "diagnostics=none", "fabric.accelerator=cpu", "fabric.n_threads=1"]
PYTHON, FABRIC = (sys.executable, "-m"), Path(sys.executable).parent / "fabric"
LONG = ["algorithm.n_iterations=400", "callbacks.checkpoint_every=1000"]


@pytest.fixture(scope="module")
def sft_runs(tmp_path_factory, share_sft_model):
    folder = tmp_path_factory.mktemp("runs")
    share_sft_model(config(folder))
    return folder


def start(launcher, *arguments, **environment):
    return subprocess.Popen(
        [*launcher, *TINY, *OPTIONS, *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def wait_for(path):
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists()


def n_rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return len(list(csv.DictReader(file)))


LAUNCHERS = {
    "torchrun": [
        *PYTHON,
        "torch.distributed.run",
        *["--nproc-per-node=2", "--master-port=29631", "-m", "lit_rlkv.fit"],
    ],
    "fabric": [str(FABRIC), "run", "--devices=2", "--main-port=29632", "scripts/fit.py"],
    # Lightning takes the command of the other ranks from __main__ and sys.argv.
    "console": [*PYTHON, "lit_rlkv", "fit", "fabric.devices=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_decides_the_number_of_processes(sft_runs, name):
    process = start(LAUNCHERS[name], f"runs_dir={sft_runs}", f"hydra.run.dir={sft_runs / name}")
    said = said_by(process)
    assert process.returncode == 0, said
    assert n_rows(sft_runs / name) == n_rows(sft_runs / name / "ranks" / "1") == 2
    assert said.count("report: ") == 1


@pytest.mark.slow
def test_one_signal_ends_all_ranks_started_by_one_slurm_task(sft_runs):
    slurm = {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}
    slurm |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
    folder = sft_runs / "asked"
    arguments = ["fabric.devices=2", *LONG, f"runs_dir={sft_runs}", f"hydra.run.dir={folder}"]
    process = start([*PYTHON, "lit_rlkv.fit"], *arguments, **slurm)
    wait_for(folder / "ranks" / "1" / "metrics.csv")
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    said = said_by(process)
    assert process.returncode == EXIT_CODE, said
    (saved,) = (folder / "checkpoints").iterdir()
    assert saved.name == f"iteration-{n_rows(folder):06d}"


@pytest.mark.slow
def test_a_signal_ends_all_ranks_during_an_evaluation_and_the_run_resumes(sft_runs):
    folder = sft_runs / "asked-while-it-evaluates"
    budgets = f"evaluation.budgets={list(range(5, 105))}".replace(" ", "")
    arguments = ["stages=[rl,eval]", f"runs_dir={sft_runs}", f"hydra.run.dir={folder}", "resume=auto"]
    process = start(
        [*PYTHON, "lit_rlkv.fit"], *arguments, "fabric.devices=2", budgets, "evaluation.n_prompts=256"
    )
    for line in process.stdout:
        if "before training" in line:
            break
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    said = said_by(process)
    assert process.returncode == EXIT_CODE, said
    assert (folder / INTERRUPTED).exists()
    assert json.loads((folder / "evaluation.json").read_text())["before"] == []  # it was still at that
    process = start([*PYTHON, "lit_rlkv.fit"], *arguments)
    said = said_by(process)
    assert process.returncode == 0, said
    assert not (folder / INTERRUPTED).exists()
    assert n_rows(folder) == 2


@pytest.mark.parametrize(
    ("code", "leaves_note", "ends_with", "is_requeued"),
    [
        (0, False, 0, False),
        (1, False, 1, False),
        (137, False, 137, False),  # a rank was killed, for it had no memory
        (75, True, 75, True),
        (137, True, 75, True),  # srun killed one that was on its way out
        (75, False, 75, True),
        (143, False, 75, True),  # SIGTERM before Python could answer it
    ],
)
@pytest.mark.parametrize(
    ("array", "name", "job", "seed"),
    [
        ({}, "mine", "7", "%a"),
        ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "4"}, "mine/4", "7_4", "4"),
    ],
)
def test_a_slurm_job_is_requeued_if_its_run_was_interrupted(
    tmp_path, code, leaves_note, ends_with, is_requeued, array, name, job, seed
):
    note, of_another = tmp_path / "runs" / name / INTERRUPTED, tmp_path / "runs" / "mine" / "3" / INTERRUPTED
    for file in (note, of_another):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()  # of the time before: a job that cannot start would else be requeued for ever
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("")
    ends = f"touch {note}; exit {code}" if leaves_note else f"exit {code}"
    for program, then in {"srun": ends, "scontrol": "exit 0"}.items():
        (tmp_path / program).write_text(f'#!/bin/bash\necho "{program} $*" >> said\n{then}\n')
        (tmp_path / program).chmod(0o755)
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "fit.sbatch"), "mine", "seed=%a"], cwd=tmp_path, check=False,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        | {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"} | array,
    )  # fmt: skip
    assert done.returncode == ends_with
    said = (tmp_path / "said").read_text().splitlines()
    assert said[0].endswith(f"-m lit_rlkv.fit hydra.run.dir=runs/{name} resume=auto seed={seed}")
    assert (said[1:] == [f"scontrol requeue {job}"]) == is_requeued
    assert of_another.exists()


@pytest.mark.parametrize("arguments", [[], ["seed=5"]])
def test_a_slurm_job_without_a_name_says_how_to_start_it(arguments):
    command = ["bash", str(ROOT / "scripts" / "fit.sbatch"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "NAME is the folder" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_is_killed_ends_the_other_rank(sft_runs, dies):
    folder = sft_runs / f"dead-{dies}"
    arguments = ["fabric.devices=2", *LONG, f"runs_dir={sft_runs}", f"hydra.run.dir={folder}"]
    process = start([*PYTHON, "lit_rlkv.fit"], *arguments)
    wait_for(folder / "ranks" / "1" / "metrics.csv")
    (other,) = ranks_started_by(process)
    os.kill((process.pid, other)[dies], signal.SIGKILL)
    said = process.communicate(timeout=60)[0]  # the other holds the pipe open as long as it lives
    assert process.returncode not in (0, EXIT_CODE), said
    wait_for_end(other)


@pytest.mark.slow
def test_a_rank_that_is_still_starting_ends_when_rank_zero_is_killed(sft_runs):
    process = start([*PYTHON, "lit_rlkv.fit"], "fabric.devices=2", f"hydra.run.dir={sft_runs / 'never'}")
    deadline = time.monotonic() + 120
    while not (ranks := ranks_started_by(process)) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=60)  # it would be half an hour
    wait_for_end(ranks[0])


def ranks_started_by(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "hydra.run.dir" in Path(f"/proc/{pid}/cmdline").read_text()]


def wait_for_end(pid):
    """A process that has let go of its pipe is gone a moment later."""
    deadline = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


def is_alive(pid):
    """False also for one that nobody has waited for."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
