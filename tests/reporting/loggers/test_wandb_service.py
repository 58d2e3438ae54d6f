"""W&B with an account, against a local service."""

import os
import subprocess
import sys

import pytest
import wandb

from lit_rlkv.reporting.loggers.wandb_run import WandbRun
from tests.reporting.loggers.offline_run import finished_runs
from tests.reporting.loggers.recorded import place, start_in
from tests.reporting.loggers.service import running

pytestmark = pytest.mark.slow


@pytest.fixture
def service(wandb_home, monkeypatch):
    wandb.teardown()  # it reads its settings once a process
    with running() as found:
        monkeypatch.setenv("WANDB_BASE_URL", found.url)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        yield found
        wandb.teardown()


def record(run_dir, iterations, resumed_at=0, **settings):
    """A part of a run, that is sent what its logger does not have; returns the logger."""
    run_dir.mkdir(exist_ok=True)
    logger = WandbRun("tests", **settings)
    logger.open(start_in(run_dir, resumed_at, seed=3))
    for iteration in (*range(1, resumed_at + 1), *iterations):
        if iteration > logger.last_iteration:
            logger.scalars({"reward": 0.5}, place(iteration))
    logger.close(is_complete=True)
    return logger


def sync(run_dir):
    """Run `wandb sync`."""
    subprocess.run(
        [sys.executable, "-m", "wandb", "sync", str(run_dir / "wandb")],
        timeout=300,
        cwd=run_dir,
        env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},
        check=True,
        capture_output=True,
    )


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_run_with_an_account_resumes_in_the_service_and_sends_again_what_that_lost(
    service, tmp_path, is_lost
):
    first = record(tmp_path / "run", range(1, 6))
    if is_lost:
        service.lines[first.run.id] = {n: line for n, line in service.lines[first.run.id].items() if n < 2}
        service.summary[first.run.id] = '{"iteration": 2, "_step": 1}'
    again = record(tmp_path / "run", range(5, 7), resumed_at=4)
    assert again.run.id == first.run.id
    assert [row["iteration"] for row in service.history(first.run.id)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("syncs_first", [False, True])
def test_a_run_that_was_offline_goes_on_in_the_service_with_all_its_iterations_once(
    service, tmp_path, syncs_first
):
    first = record(tmp_path / "run", range(1, 5), offline=True)
    finished_runs(tmp_path / "run")
    if syncs_first:
        sync(tmp_path / "run")
    again = record(tmp_path / "run", range(4, 7), resumed_at=3)
    assert again.run.id == first.run.id
    sync(tmp_path / "run")
    assert [row["iteration"] for row in service.history(first.run.id)] == [1, 2, 3, 4, 5, 6]
