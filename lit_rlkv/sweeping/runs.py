"""The runs of a sweep: drawn and remembered by Optuna, checked, and run by processes of fit."""

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import optuna
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from lit_rlkv.config import ConfigError
from lit_rlkv.evaluation.results import Results
from lit_rlkv.reporting.run_metrics import read_metrics
from lit_rlkv.rng import derive_seed
from lit_rlkv.run_files import METRICS
from lit_rlkv.sweeping.sweep_file import Sweep, Values

STUDY = "study.db"
SEED = 0
SAMPLERS = {"grid": RandomSampler, "random": RandomSampler, "bayes": TPESampler}
"""Sampler of each method; it has nothing to draw for a grid."""


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep."""

    number: int
    values: Values
    folder: Path

    @property
    def log(self) -> Path:
        """What its process prints."""
        return self.folder.with_suffix(".log")

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last iteration, with those of the final evaluation."""
        rows = read_metrics(self.folder / METRICS)
        return {**(rows[-1] if rows else {}), **Results.load(self.folder).final}

    def value(self, metric: str) -> float | None:
        """Return the metric; None if the run has not logged it, or not as a finite number."""
        value = self.metrics().get(metric, math.nan)
        return value if math.isfinite(value) else None


class SweepStudy:
    """The runs of a sweep as trials of an Optuna study in its folder; trial n of a grid is its n-th cell.

    A trial ends when its run has ended well; a run that was cut short or failed is done again by the next
    process that opens the study. The storage is SQLite: a kill in the middle of a write leaves half a line in
    Optuna's journal file, which can then be read no more.

    Raises:
        ConfigError: the folder holds another sweep.
    """

    def __init__(self, sweep: Sweep, folder: Path, n_runs: int) -> None:
        self.sweep, self.folder, self.n_runs = sweep, folder, n_runs
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        self.study = optuna.create_study(
            storage=f"sqlite:///{(folder / STUDY).resolve()}",
            study_name="sweep",
            direction=sweep.metric.goal,
            load_if_exists=True,
        )
        made_of = repr([sweep.method, sweep.metric, sweep.fixed, sweep.space])
        if self.study.user_attrs.get("made_of", made_of) != made_of:
            raise ConfigError(f"{folder} holds another sweep; give another --dir, or remove it")
        self.study.set_user_attr("made_of", made_of)

    def unfinished(self) -> Iterator[SweepRun]:
        """Yield the runs to do, one at a time: those begun before, then new ones."""
        for trial in self.study.trials:
            if trial.state is TrialState.RUNNING and self._is_whole(trial):
                yield self._run(trial)
            elif trial.state is TrialState.RUNNING:  # a kill came in the middle of its draw
                self.study.tell(trial.number, state=TrialState.FAIL)
        space = {} if self.sweep.method == "grid" else self.sweep.space
        while len(self._whole()) < self.n_runs:
            # Seeded anew for each draw, so that a sweep that is resumed does not repeat its first ones.
            seed = derive_seed(SEED, "sweep", len(self.study.trials)) % 2**32
            self.study.sampler = SAMPLERS[self.sweep.method](seed=seed)
            number = self.study.ask(space).number
            yield self._run(self.study.trials[number])

    def finish(self, run: SweepRun) -> float | None:
        """Record and return the metric of a run that has ended well; None if it has no finite value."""
        value = run.value(self.sweep.metric.name)
        self.study.tell(run.number, value, TrialState.FAIL if value is None else TrialState.COMPLETE)
        return value

    def ended(self) -> list[SweepRun]:
        """Return the runs that have ended well, in the order of their numbers."""
        return [self._run(trial) for trial in self._whole() if trial.state.is_finished()]

    def _is_whole(self, trial: FrozenTrial) -> bool:
        """True if all values of a trial are drawn."""
        return self.sweep.method == "grid" or trial.params.keys() == self.sweep.space.keys()

    def _whole(self) -> list[FrozenTrial]:
        return [trial for trial in self.study.trials if self._is_whole(trial)]

    def _run(self, trial: FrozenTrial) -> SweepRun:
        is_grid = self.sweep.method == "grid"
        values = self.sweep.cells[trial.number] if is_grid else trial.params
        texts = {key: str(value) for key, value in values.items()}
        return SweepRun(trial.number, texts, self.folder / f"{trial.number:04d}")


@dataclass
class Workers:
    """Runs what a study has left, `n_jobs` processes of fit at a time."""

    study: SweepStudy
    n_jobs: int
    console: Console
    failed: list[SweepRun] = field(default_factory=list)
    _alive: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _is_ending: bool = False

    def run(self) -> None:
        """Return when all runs have ended; on an error all processes save their run and end first."""
        self._todo, self._lock = self.study.unfinished(), threading.Lock()
        with ThreadPoolExecutor(self.n_jobs) as pool:
            workers = [pool.submit(self._work) for _ in range(self.n_jobs)]
            try:
                for worker in as_completed(workers):
                    worker.result()
            finally:
                with self._lock:
                    self._is_ending = True
                    for process in self._alive:
                        process.terminate()

    def _work(self) -> None:
        while (started := self._start_next()) is not None:
            run, process = started
            process.wait()
            with self._lock:
                self._alive.remove(process)
                if not self._is_ending:
                    self._end(run, process.returncode)

    def _start_next(self) -> tuple[SweepRun, subprocess.Popen[bytes]] | None:
        """Start the next run; None if there is none, or the sweep is ending."""
        with self._lock:
            run = None if self._is_ending else next(self._todo, None)
            if run is None:
                return None
            arguments = self.study.sweep.arguments(run.values, run.folder)
            with run.log.open("ab") as log:
                # A session of its own: Ctrl-C reaches the sweep alone, which then ends its runs.
                process = subprocess.Popen(
                    [sys.executable, "-m", "lit_rlkv.fit", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={"OMP_NUM_THREADS": "1"} | os.environ,
                    start_new_session=True,
                )
            self._alive.append(process)
            return run, process

    def _end(self, run: SweepRun, code: int) -> None:
        if code:
            self.failed.append(run)
            said = f"exit status {code}, see {run.log}"
        else:
            name, value = self.study.sweep.metric.name, self.study.finish(run)
            said = f"{name} {value:.4g}" if value is not None else f"no value of {name}"
        named = "  ".join(f"{key}={value}" for key, value in run.values.items())
        self.console.print(
            f"run {run.number}: {named}  {said}", markup=False, highlight=False, soft_wrap=True
        )
