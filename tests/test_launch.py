"""Runs started as users start them on several processes, by the command line."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_rlkv.faults import EXIT_CODE
from tests.tiny import TINY, run

ROOT = Path(__file__).parent.parent
OPTIONS = ["stages=[rl]", "diagnostics=none", "fabric.accelerator=cpu", "fabric.n_threads=1"]
PYTHON, FABRIC = (sys.executable, "-m"), Path(sys.executable).parent / "fabric"
LONG = ["algorithm.n_iterations=400", "callbacks.checkpoint_every=1000"]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run(folder, "first", "stages=[sft]")
    return folder


def start(launcher, *arguments):
    return subprocess.Popen(
        [*launcher, *TINY, *OPTIONS, *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
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
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_decides_on_the_number_of_processes(warm, name):
    process = start(LAUNCHERS[name], f"runs_dir={warm}", f"hydra.run.dir={warm / name}")
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert n_rows(warm / name) == n_rows(warm / name / "ranks" / "1") == 2
    assert said.count("report: ") == 1


def test_one_signal_ends_all_ranks_and_what_is_left_goes_on(warm):
    folder = warm / "asked"
    arguments = ["fabric.devices=2", *LONG, f"runs_dir={warm}", f"hydra.run.dir={folder}"]
    process = start([*PYTHON, "lit_rlkv.fit"], *arguments)
    wait_for(folder / "ranks" / "1" / "metrics.csv")
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[0]
    assert process.returncode == EXIT_CODE, said
    (saved,) = (folder / "checkpoints").iterdir()
    assert saved.name == f"iteration-{n_rows(folder):06d}"


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_takes_the_other_with_it_and_nobody_waits(warm, dies):
    folder = warm / f"dead-{dies}"
    arguments = ["fabric.devices=2", *LONG, f"runs_dir={warm}", f"hydra.run.dir={folder}"]
    process = start([*PYTHON, "lit_rlkv.fit"], *arguments)
    wait_for(folder / "ranks" / "1" / "metrics.csv")
    (other,) = ranks_started_by(process)
    os.kill((process.pid, other)[dies], signal.SIGKILL)
    said = process.communicate(timeout=60)[0]  # the other holds the pipe open as long as it lives
    assert process.returncode not in (0, EXIT_CODE), said
    wait_for_end(other)


def test_a_rank_that_is_still_starting_when_the_first_dies_does_not_wait_for_it(warm):
    process = start([*PYTHON, "lit_rlkv.fit"], "fabric.devices=2", f"hydra.run.dir={warm / 'never'}")
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
