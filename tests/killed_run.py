"""Train a run that is killed again and again.

Everything is imported once. Each attempt is a fork that resumes the run in `hydra.run.dir`; all but the
last are killed with SIGKILL at a random moment, checkpoint writes included.
"""

import os
import random
import signal
import time
import traceback
from pathlib import Path

from rich.console import Console

from lit_rlkv.config import composed
from lit_rlkv.fit import fit
from lit_rlkv.run_files import CHECKPOINTS, CONFIG
from lit_rlkv.runs.checkpoint import CheckpointDir
from lit_rlkv.runs.preflight import checked_config
from tests.whole_runs import TINY, plain_reports

EARLY_S = 1.5
"""Time within which an attempt dies that may die before it has saved anything."""
MOST_SAVED = 5
"""Iterations after which an attempt is killed in any case."""


def attempt(overrides: list[str], run_dir: Path) -> None:
    cfg = composed("config", [*TINY, *overrides])
    del cfg.hydra
    cfg = checked_config(cfg)
    with plain_reports():
        fit(cfg, run_dir, Console(quiet=True), resumes=(run_dir / CONFIG).exists())


def fork(overrides: list[str], run_dir: Path) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            attempt(overrides, run_dir)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def wait_for_progress(child: int, run_dir: Path, n_before: int) -> None:
    """Wait until this attempt has saved an iteration, so that every attempt makes progress."""
    while n_saved(run_dir) <= n_before:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "an attempt ended by itself"
        time.sleep(0.005)


def n_saved(run_dir: Path) -> int:
    names = [path.name for path in CheckpointDir(run_dir / CHECKPOINTS).all()]
    return max((int(name.rpartition("-")[2]) for name in names), default=0)


def run_killed(runs_dir: Path, name: str, n_kills: int, *overrides: str) -> list[int]:
    """Train a run of this name as `main` does."""
    return main(0, n_kills, [*overrides, f"runs_dir={runs_dir}", f"hydra.run.dir={runs_dir / name}"])


def main(seed: int, n_kills: int, overrides: list[str], early: float = 0.0) -> list[int]:
    """Kill a run and resume it; return how many iterations were done at each kill.

    Args:
        early: share of the kills that may come before an attempt has saved an iteration.
    """
    rng, n_done = random.Random(seed), []
    run_dir = Path(next(o for o in overrides if o.startswith("hydra.run.dir=")).partition("=")[2])
    for _ in range(n_kills):
        n_before = n_saved(run_dir)
        child = fork(overrides, run_dir)
        if rng.random() < early:
            dies_at = time.monotonic() + rng.uniform(0, EARLY_S)
        else:
            wait_for_progress(child, run_dir, n_before)
            dies_at = time.monotonic() + rng.uniform(0, 0.2)
        # A fast machine would be done before it has been killed often enough.
        while time.monotonic() < dies_at and n_saved(run_dir) < n_before + MOST_SAVED:
            time.sleep(0.002)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the run ended before it was killed"
        n_done.append(n_saved(run_dir))
    assert os.waitpid(fork(overrides, run_dir), 0)[1] == 0
    return n_done
