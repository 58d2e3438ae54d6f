"""Ctrl-C: one line, exit code 130, and a run that resumes from its last whole state."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lit_rlkv.interrupts import (
    EXIT_CODE,
    REQUEUE,
    SIGNALS,
    abort_on_ctrl_c,
    call_at_first_ctrl_c,
    unwind_on_ctrl_c,
)
from lit_rlkv.reporting.run_metrics import read_metrics
from lit_rlkv.run_files import METRICS
from tests.forks import in_a_fork
from tests.test_resume import OPTIONS, assert_same_run
from tests.tiers import slow
from tests.whole_runs import TINY, run

ROOT = Path(__file__).parent.parent
LONG = ["stages=[rl]", "diagnostics=none", "algorithm.n_iterations=4000", "callbacks.samples_every=9999"]


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def start(module, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", f"lit_rlkv.{module}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # A background job of a shell ignores Ctrl-C, and so may this test run.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def interrupt(process, at, delay_s=0.0):
    """Send SIGINT once a line has this text, and return the output since then."""
    assert any(at in line for line in process.stdout)
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == EXIT_CODE, said
    assert "Traceback" not in said
    return said


def resume_argument(said):
    return re.search(r"resume with python -m lit_rlkv\.fit (resume=\S+)\n$", said)[1]


@pytest.mark.usefixtures("own_ctrl_c")
def test_the_first_ctrl_c_calls_the_handler_and_the_handler_before_comes_back():
    calls = []
    with call_at_first_ctrl_c(lambda: calls.append("never")):
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with call_at_first_ctrl_c(lambda: calls.append("outer")):
        with call_at_first_ctrl_c(lambda: calls.append("first")):
            press_ctrl_c()
        ends_at_once = signal.getsignal(signal.SIGINT)
    assert calls == ["first"]
    assert signal.getsignal(signal.SIGINT) is ends_at_once
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with call_at_first_ctrl_c(lambda: calls.append("third")):
        press_ctrl_c()
    assert calls == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("own_ctrl_c")
def test_a_block_is_left_with_its_clean_up_and_one_line(capfd):
    cleaned = []

    @unwind_on_ctrl_c("interrupted; nothing was written")
    def work():
        try:
            press_ctrl_c()
        finally:
            cleaned.append(True)

    with pytest.raises(SystemExit) as exit_of:
        work()
    assert exit_of.value.code == EXIT_CODE
    assert cleaned == [True]
    assert capfd.readouterr().err == "interrupted; nothing was written\n"


def test_code_that_catches_everything_cannot_hold_up_the_end():
    def stubborn():
        with abort_on_ctrl_c("interrupted before the run began"):
            while True:
                with suppress(BaseException):  # as in the middle of an import
                    press_ctrl_c()

    assert in_a_fork(stubborn) == (EXIT_CODE, "interrupted before the run began\n")


def test_a_second_ctrl_c_ends_the_process_at_once():
    def slow_to_end():
        with unwind_on_ctrl_c("never said"):
            try:
                press_ctrl_c()
            finally:
                press_ctrl_c()
                time.sleep(60)

    assert in_a_fork(slow_to_end) == (EXIT_CODE, "ended at once\n")


@pytest.mark.slow
def test_a_run_interrupted_in_an_iteration_resumes_bit_for_bit(sft_runs):
    options = [*OPTIONS, "algorithm.n_iterations=20"]
    run(sft_runs, "straight", *options)
    folder = sft_runs / "interrupted"
    process = start("fit", *TINY, *options, f"runs_dir={sft_runs}", f"hydra.run.dir={folder}")
    said = interrupt(process, "iteration 2/20", delay_s=0.05)
    assert "interrupted; " in said
    assert 0 < len(read_metrics(folder / METRICS)) < 20
    assert resume_argument(said) == f"resume={folder}"
    run(sft_runs, "interrupted", *options, resumes=True)
    assert_same_run(folder, sft_runs / "straight")


@pytest.mark.slow
def test_a_run_interrupted_in_an_update_goes_back_to_its_last_checkpoint(sft_runs, tmp_path):
    options = [
        "algorithm.group_size=8",
        "rollout.n_prompts=512",
        "algorithm.n_epochs=50",
        "callbacks.checkpoint_every=1",
    ]
    folder = tmp_path / "long-updates"
    arguments = [*TINY, *LONG, *options, f"runs_dir={sft_runs}", f"hydra.run.dir={folder}"]
    process = start("fit", *arguments)
    started_at = time.monotonic()
    said = interrupt(process, "rl 4000 iterations", delay_s=8.0)
    assert "interrupted; " in said
    assert time.monotonic() - started_at < 60
    assert not (folder / ".interrupted").exists()  # no scheduler is to start it again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "at"),
    [
        (["sft.n_steps=4000", "stages=[sft]"], " 40/400"),
        (["stages=[sft,eval]", "evaluation.n_prompts=256"], "eval 1/"),
        (["evaluation.n_prompts=256"], "eval 1/"),
    ],
)
def test_an_interrupt_in_any_stage_says_how_to_resume(tmp_path, options, at):
    folder = tmp_path / "run"
    process = start("fit", *TINY, *options, f"runs_dir={tmp_path}", f"hydra.run.dir={folder}")
    said = interrupt(process, at)
    assert resume_argument(said) == f"resume={folder}"
    if "sft" in at:
        (saved,) = (folder / "sft").glob("*/checkpoints/*")
        assert int(saved.name.removeprefix("iteration-")) >= 39  # the line comes before its save


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 1.0, 2.5])
def test_an_interrupt_during_the_imports_leaves_nothing(tmp_path, delay_s):
    process = start("fit", *TINY, f"runs_dir={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}")
    said = interrupt(process, "loading torch", delay_s)
    assert said.splitlines() in (
        ["interrupted before any work; nothing has changed"],
        ["interrupted; there is nothing to resume"],
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_scheduler_that_ends_a_run_during_the_imports_may_start_it_again(tmp_path, number):
    process = start("fit", *TINY, f"runs_dir={tmp_path}", f"hydra.run.dir={tmp_path / 'run'}")
    assert process.stdout is not None
    while "loading torch" not in process.stdout.readline():
        pass
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == REQUEUE, said
    assert not (tmp_path / "run").exists()


SWALLOWS = """
import os, signal, time

try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except BaseException:
    pass
raise ImportError("the interrupt was caught in the middle of this import")
"""


@pytest.mark.parametrize(
    ("module", "slow_module", "arguments"),
    [
        ("fit", "torch", []),
        ("evaluate", "torch", ["ckpt=runs/x"]),
        slow("export", "torch", ["ckpt=runs/x", "to=x"]),
        slow("sweep", "torch", ["sweeps/arms.yaml"]),
        ("report", "matplotlib", ["{run}"]),
        slow("fit", "torchmetrics", []),  # of the last module that it imports
        slow("evaluate", "torchmetrics", ["ckpt=runs/x"]),
    ],
)
def test_an_interrupt_in_the_middle_of_an_import_that_catches_everything_is_one_line(
    tmp_path, monkeypatch, module, slow_module, arguments
):
    run_dir, packages = tmp_path / "run", tmp_path / "packages"
    (packages / slow_module).mkdir(parents=True)
    (packages / slow_module / "__init__.py").write_text(SWALLOWS)
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("seed: 0\n")
    monkeypatch.setenv("PYTHONPATH", str(packages), prepend=os.pathsep)
    process = start(module, *(argument.format(run=run_dir) for argument in arguments))
    said = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == EXIT_CODE, said
    assert [line.partition(" ")[0].rstrip(";") for line in said if not line.startswith("loading ")] == [
        "interrupted"
    ]


@pytest.mark.slow
def test_an_interrupted_evaluation_or_export_writes_nothing(sft_runs, tmp_path):
    ckpt = tmp_path / "run"
    shutil.copytree(sft_runs / "first", ckpt)
    before = sorted(ckpt.iterdir())
    said = interrupt(start("evaluate", f"ckpt={ckpt}", "n_prompts=2000"), "eval 1/")
    assert said.splitlines()[-1] == "interrupted"
    assert sorted(ckpt.iterdir()) == before
    said = interrupt(start("export", f"ckpt={ckpt}", f"to={tmp_path / 'out'}"), "loading torch", 1.0)
    assert said.startswith("interrupted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_all_ranks_together(sft_runs):
    folder = sft_runs / "two-ranks"
    arguments = [*TINY, *LONG, "fabric.accelerator=cpu", "fabric.devices=2", "fabric.n_threads=1"]
    process = start("fit", *arguments, f"runs_dir={sft_runs}", f"hydra.run.dir={folder}")
    assert any("rl 4000 iterations" in line for line in process.stdout)
    time.sleep(3.0)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in [*map(int, children), process.pid]:  # a terminal sends it to every process in the foreground
        os.kill(pid, signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == EXIT_CODE, said
    assert "Traceback" not in said
    assert said.count("interrupted: all processes end with this step") == 1
    assert len(re.findall(r"^interrupted; resume with", said, re.M)) == 1
    assert any((folder / "checkpoints").iterdir())
