"""A process of fit in a run's folder, and what the folder says of the run."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lit_rlkv.reporting.run_metrics import read_metrics
from lit_rlkv.runs.context import CONFIG, EVALUATION, METRICS
from lit_rlkv.runs.resume import is_done

LOCK, OUTPUT = "run.lock", "output.log"
"""Files in a run's folder: locked while a process of fit lives, and the output of that process."""
GRACE_S = 10.0
"""Time that a process has to end before it is killed."""
N_TAIL = 12
"""Lines of a failed run's output to show."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: str
    """finished, stopped (early, by the sweep) or failed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last iteration and of the final evaluation."""
    history: list[float] = field(default_factory=list)
    """All logged values of the sweep's metric, in the order of training."""
    reason: str = ""


class FitJob:
    """A run of fit in a folder of its own.

    The process inherits a lock on a file there, so a later sweep finds the processes that a killed sweep left
    behind. filelock cannot hand its lock to another process, and fit locks its folder only seconds after its
    start.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        self.folder = folder
        self._process = process
        self._read_at: tuple[int, int] | None = None
        self._rows: list[dict[str, float]] = []

    @classmethod
    def start(cls, folder: Path, arguments: Sequence[str]) -> "FitJob":
        """Start fit with these arguments, or join the process that works in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with (folder / OUTPUT).open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "lit_rlkv.fit", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={"OMP_NUM_THREADS": "1"} | os.environ,
                    pass_fds=[lock],  # holds the lock from here on
                    process_group=0,  # Ctrl-C reaches only the sweep, which then stops its runs
                )
            os.ftruncate(lock, 0)
            os.write(lock, str(process.pid).encode())
        except BlockingIOError:
            return cls(folder)
        finally:
            os.close(lock)
        return cls(folder, process)

    @property
    def is_running(self) -> bool:
        """True while the process lives, whichever sweep started it."""
        return is_locked(self.folder) if self._process is None else self._process.poll() is None

    def history(self, metric: str) -> list[float]:
        """Return the values of a metric that the run has logged so far."""
        path = self.folder / METRICS
        if path.is_file():
            about = path.stat()
            if self._read_at != (about.st_size, about.st_mtime_ns):  # a sweep asks again and again
                self._read_at, self._rows = (about.st_size, about.st_mtime_ns), read_metrics(path)
        return [row[metric] for row in self._rows if metric in row]

    def outcome(self, metric: str) -> Outcome:
        """Return how the run ended; the reason of a failure ends with the file to look in."""
        metrics, history = found_metrics(self.folder), self.history(metric)
        if history:  # the last row lacks a metric that is not logged in every iteration
            metrics.setdefault(metric, history[-1])
        if is_done(self.folder):
            return Outcome("finished", metrics, history)
        status = "" if self._process is None else f" with exit status {self._process.returncode}"
        path = self.folder / OUTPUT
        lines = path.read_text(errors="replace").splitlines()[-N_TAIL:] if path.is_file() else []
        return Outcome("failed", metrics, history, "\n".join([f"ended{status}", *lines, f"see {path}"]))

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the process, if there is one."""
        self._signal(signal.SIGTERM)

    def wait(self) -> None:
        """Wait for the process to end; kill it if that takes long."""
        deadline = time.monotonic() + GRACE_S
        while self.is_running:
            if time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
            time.sleep(0.05)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_running and (
            text := (self.folder / LOCK).read_text()
        ):  # empty while the process is started
            os.killpg(int(text), number)


def is_locked(folder: Path) -> bool:
    """True while a process of fit lives that a sweep started in this folder."""
    if not (folder / LOCK).is_file():
        return False
    lock = os.open(folder / LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def can_resume(folder: Path) -> bool:
    """True if a run has begun in the folder; fit itself finds what it can resume from."""
    return (folder / CONFIG).is_file()


def found_metrics(folder: Path) -> dict[str, float]:
    """Return the metrics of the last iteration, with those of the final evaluation."""
    rows = read_metrics(folder / METRICS)
    found: dict[str, float] = dict(rows[-1]) if rows else {}
    if (folder / EVALUATION).is_file():
        found |= json.loads((folder / EVALUATION).read_text())["final"]
    return found
