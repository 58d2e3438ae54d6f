"""A run under way: what its folder says, and the process that works in it."""

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
"""In a run's folder: held by its process as long as that lives, and what that printed."""
GRACE_S = 10.0
"""From asking a process to end to killing it."""
N_TAIL = 12
"""Lines of a failed run's output that are shown."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: str
    """finished, stopped (early, by the sweep) or failed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of its last iteration, and those of its final evaluation."""
    history: list[float] = field(default_factory=list)
    """The sweep's metric, each value that was logged while the run trained."""
    reason: str = ""


class FitJob:
    """A run of fit in a folder of its own.

    Its process holds a lock on a file there, so that a later sweep sees whether it lives, whoever started it.
    """

    def __init__(self, folder: Path, child: subprocess.Popen[bytes] | None = None) -> None:
        self.folder = folder
        self._child = child
        self._seen: tuple[int, int] | None = None
        self._rows: list[dict[str, float]] = []

    @classmethod
    def start(cls, folder: Path, arguments: Sequence[str]) -> "FitJob":
        """Start fit with these arguments, or join the process that works in the folder already."""
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with (folder / OUTPUT).open("ab") as output:
                child = subprocess.Popen(
                    [sys.executable, "-m", "lit_rlkv.fit", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                    pass_fds=[lock],  # what holds the lock from here on
                    process_group=0,  # Ctrl-C reaches the sweep alone, which then stops its runs
                )
            os.ftruncate(lock, 0)
            os.write(lock, str(child.pid).encode())
        except BlockingIOError:
            return cls(folder)
        finally:
            os.close(lock)
        return cls(folder, child)

    @property
    def is_running(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return is_worked_in(self.folder)

    def history(self, metric: str) -> list[float]:
        """The values of a metric that it has logged so far."""
        return [row[metric] for row in self._read() if metric in row]

    def _read(self) -> list[dict[str, float]]:
        """What its metrics file holds, parsed again where it has changed only: a sweep asks all the time."""
        path = self.folder / METRICS
        if path.is_file():
            about = path.stat()
            if self._seen != (about.st_size, about.st_mtime_ns):
                self._seen, self._rows = (about.st_size, about.st_mtime_ns), read_metrics(path)
        return self._rows

    def outcome(self, metric: str) -> Outcome:
        """How it ended, once it no longer runs; what is wrong with one that failed ends in where to look."""
        metrics, history = found_metrics(self.folder), self.history(metric)
        if history:  # one that is not logged in every iteration is missing in the last row
            metrics.setdefault(metric, history[-1])
        if is_done(self.folder):
            return Outcome("finished", metrics, history)
        code = "" if self._child is None else f" with exit status {self._child.returncode}"
        where = f"see {self.folder / OUTPUT}"
        return Outcome("failed", metrics, history, "\n".join([f"ended{code}", *self._tail(), where]))

    def ask_to_stop(self) -> None:
        """Begin to end it, if it still runs."""
        self._signal(signal.SIGTERM)

    def wait(self) -> None:
        """Until it has ended, by force if it takes long."""
        deadline = time.monotonic() + GRACE_S
        while self.is_running and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.is_running:
            self._signal(signal.SIGKILL)
        while self.is_running:
            time.sleep(0.05)

    def _signal(self, number: signal.Signals) -> None:
        if not self.is_running:
            return
        text = (self.folder / LOCK).read_text()
        if text:  # empty for a moment only, while the process is being started
            os.killpg(int(text), number)

    def _tail(self) -> list[str]:
        path = self.folder / OUTPUT
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        return lines[-N_TAIL:]


def is_worked_in(folder: Path) -> bool:
    """Whether a process of fit lives that a sweep started in this folder."""
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
    """Whether a run has begun: fit itself finds what of its SFT stage and training it can go on from."""
    return (folder / CONFIG).is_file()


def found_metrics(folder: Path) -> dict[str, float]:
    """Metrics of the last iteration, with those of the final evaluation."""
    rows = read_metrics(folder / METRICS)
    found: dict[str, float] = dict(rows[-1]) if rows else {}
    if (folder / EVALUATION).is_file():
        found |= json.loads((folder / EVALUATION).read_text())["final"]
    return found
