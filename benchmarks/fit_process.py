"""Runs of fit as processes of their own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
N_LAST_LINES = 5
"""Lines of a log that say why a run failed."""


def fit(
    folder: Path,
    runs_dir: Path,
    overrides: Iterable[str],
    before: Iterable[str] = (),
    *,
    n_threads: int | None = 1,
    resumes: bool = False,
    limit_s: float | None = None,
) -> Path:
    """One run in a folder, from the SFT models of `runs_dir`; its log is beside the folder.

    Args:
        before: what stands before the command, such as taskset.
        n_threads: threads of the run; None: as many as fit takes by itself.
        resumes: go on with the run of the folder, if there is one, instead of beginning anew.
        limit_s: seconds after which it is killed.

    Raises:
        RuntimeError: it failed; with the end of its log.
        subprocess.TimeoutExpired: it was killed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [*before, sys.executable, "-m", "lit_rlkv.fit"]
    if resumes:
        command.append("resume=auto")
    else:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that did not finish
    environment = dict(os.environ)
    if n_threads is not None:
        command.append(f"fabric.n_threads={n_threads}")
        environment["OMP_NUM_THREADS"] = str(n_threads)
    log_path = Path(f"{folder}.log")
    with log_path.open("w") as log:
        done = subprocess.run(
            [*command, f"runs_dir={runs_dir}", f"hydra.run.dir={folder}", *overrides],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            check=False,
            timeout=limit_s,
        )
    if done.returncode:
        tail = "\n".join(log_path.read_text().splitlines()[-N_LAST_LINES:])
        raise RuntimeError(f"{folder.name} ended with {done.returncode}:\n{tail}")
    return folder
