"""Kills at random moments of fit, evaluate, export and sweep: what is resumed equals an unbroken one."""

import json
import os
import random
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from shutil import copytree

import pytest

from lit_rlkv.run_files import CHECKPOINTS
from tests import killed_run
from tests.fuzz.harness import outcome_of
from tests.sweeping.files import GRID, with_parameters, write
from tests.test_resume import assert_same_run
from tests.test_sweep import N_ITERATIONS as SWEPT
from tests.test_sweep import SMALL, run_here, runs_of, start
from tests.whole_runs import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_as_users_run_it")]

OPTIONS = ["stages=[rl]", "callbacks.checkpoint_every=1", "callbacks.samples_every=9", "diagnostics=none"]
SMALL_EVALUATION = ["evaluation.budgets=[]", "evaluation.n_prompts=8", "evaluation.n_mismatch=8"]
N_KILLS = {"fit": 9, "evaluate": 6, "export": 6, "sweep": 2}
"""Kills of each command, of fit by algorithm: 41 in all."""
N_ITERATIONS = 65


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished run, whose SFT model the others share."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder, "whole", *SMALL_EVALUATION)
    return folder


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "online_dpo"])
def test_a_run_killed_also_while_it_starts_resumes_bit_for_bit(runs, algorithm):
    options = [*OPTIONS, f"algorithm={algorithm}", f"algorithm.n_iterations={N_ITERATIONS}"]
    straight, folder = (runs / f"{kind}-{algorithm}" for kind in ("straight", "killed"))
    run(runs, straight.name, *options)
    here = [*options, f"runs_dir={runs}", f"hydra.run.dir={folder}"]
    found = outcome_of(
        lambda: killed_run.main(1, N_KILLS["fit"], here, early=0.3), limit_s=280, memory=8 << 30
    )
    assert found.trace == ""
    assert_same_run(folder, straight)


def entered(command: str, arguments: list[str]) -> int:
    """Start a command line in a fork, without output, and return its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            sys.argv = [command, *arguments]
            import_module(f"lit_rlkv.{command}").main()
            status = 0
        finally:
            os._exit(status)
    return child


def killed(child: int, after_s: float) -> bool:
    """Kill a process after a while; False if it had ended well before."""
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def check_kills(command: str, arguments: list[str], n_kills: int, check_between) -> None:
    """Kill a command line that many times, then let it end."""
    rng, n_killed, longest_s = random.Random(2), 0, 1.5
    while n_killed < n_kills:
        is_killed = killed(entered(command, arguments), rng.uniform(0, longest_s))
        n_killed += is_killed
        longest_s = longest_s * (1.2 if is_killed else 0.8)  # to meet every phase, the last writes too
        check_between()
    assert os.waitpid(entered(command, arguments), 0)[1] == 0


def test_a_killed_evaluation_leaves_no_partial_results(runs):
    folder, straight = runs / "scored", runs / "scored-straight"
    for copy in (folder, straight):
        copytree(runs / "whole", copy)
    assert os.waitpid(entered("evaluate", [f"ckpt={straight}"]), 0)[1] == 0
    before = contents(folder)

    def check_between() -> None:
        now = contents(folder)
        assert {name: now.get(name) for name in before} == before
        if "evaluate.json" in now:
            check_same()

    def check_same() -> None:
        ours, theirs = (json.loads((one / "evaluate.json").read_text()) for one in (folder, straight))
        assert ours["rows"] == theirs["rows"]
        samples = [(one / "evaluate_samples.jsonl").read_bytes() for one in (folder, straight)]
        assert samples[0] == samples[1]

    check_kills("evaluate", [f"ckpt={folder}"], N_KILLS["evaluate"], check_between)
    check_same()


def test_a_killed_export_is_whole_or_not_there(runs, tmp_path):
    given = [f"ckpt={runs / 'whole'}"]
    assert os.waitpid(entered("export", [*given, f"to={tmp_path / 'straight'}"]), 0)[1] == 0
    expected, before, folder = contents(tmp_path / "straight"), contents(runs / "whole"), tmp_path / "killed"

    def check_between() -> None:
        assert contents(runs / "whole") == before
        assert not folder.exists() or contents(folder) == expected

    check_kills("export", [*given, f"to={folder}", "overwrite=true"], N_KILLS["export"], check_between)
    assert contents(folder) == expected


def test_a_sweep_killed_at_random_has_the_results_of_an_unbroken_one(tmp_path):
    content = with_parameters(
        GRID,
        seed={"values": [0, 1]},
        cache__budget={"value": 7},
        sft__seed={"value": 0},
    )
    rng, folder = random.Random(3), tmp_path / "sweep"
    for _ in range(N_KILLS["sweep"]):
        sweep = start(write(tmp_path, content), folder, SMALL)
        time.sleep(rng.uniform(5, 25))
        sweep.kill()
        sweep.communicate()  # its runs live on, and the next sweep waits for them
    assert run_here(folder, content) == []
    (tmp_path / "other").mkdir()
    straight = tmp_path / "other" / "sweep"
    assert run_here(straight, content) == []
    assert len(runs_of(folder)) == len(runs_of(straight)) == 2
    for ours, theirs in zip(runs_of(folder), runs_of(straight), strict=True):
        weights = f"{CHECKPOINTS}/iteration-{SWEPT:06d}/trainable.safetensors"
        assert (ours / weights).read_bytes() == (theirs / weights).read_bytes()
