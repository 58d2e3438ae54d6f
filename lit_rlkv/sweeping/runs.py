"""The runs of a sweep: drawn and remembered by Optuna, checked, and run by processes of fit."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import optuna
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from lit_rlkv.config import ConfigError, check_keys, composed, grant_trust
from lit_rlkv.config.composing import initialized
from lit_rlkv.config.targets import check_saved_code, user_code
from lit_rlkv.reporting.progress import track
from lit_rlkv.reporting.run_metrics import read_metrics
from lit_rlkv.rng import derive_seed
from lit_rlkv.run_files import EVALUATION, METRICS
from lit_rlkv.runs.lock import BusyError, FolderLock
from lit_rlkv.runs.preflight import checked_config
from lit_rlkv.runs.starting_model import find_starting_model, sft_model_dir
from lit_rlkv.sweeping.sweep_file import Sweep, Values

STUDY = "study.db"
SEED = 0
POLL_S = 0.2


@dataclass(frozen=True)
class Run:
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
        path = self.folder / EVALUATION
        final = json.loads(path.read_text())["final"] if path.is_file() else {}
        return {**(rows[-1] if rows else {}), **final}


class SweepStudy:
    """The runs of a sweep as trials of an Optuna study in its folder.

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
        # A grid may gain values in its folder; what else decides a run must not change.
        space = (
            sorted(sweep.space) if sweep.method == "grid" else {k: repr(v) for k, v in sweep.space.items()}
        )
        made_of = json.loads(
            json.dumps([sweep.method, sweep.metric.name, sweep.metric.goal, sweep.fixed, space])
        )
        if self.study.user_attrs.get("made_of", made_of) != made_of:
            raise ConfigError(f"{folder} holds another sweep; give another --dir, or remove it")
        self.study.set_user_attr("made_of", made_of)

    def unfinished(self) -> Iterator[Run]:
        """Yield the runs to do, one at a time: those begun before, then new ones."""
        begun = [trial for trial in self.study.trials if trial.state is TrialState.RUNNING]
        for trial in begun:
            if self._values(trial).keys() == self.sweep.space.keys():
                yield self._run(trial)
            else:  # a kill came in the middle of its draw
                self.study.tell(trial.number, state=TrialState.FAIL)
        known = [self._values(trial) for trial in self._kept()]
        cells = (cell for cell in self.sweep.cells if cell not in known)
        while len(self._kept()) < self.n_runs:
            if self.sweep.method == "grid":
                self.study.enqueue_trial({}, user_attrs={"values": next(cells)})
                yield self._asked({})
                continue
            kind = (
                optuna.samplers.TPESampler if self.sweep.method == "bayes" else optuna.samplers.RandomSampler
            )
            # Seeded anew for each draw, so that a sweep that is resumed does not repeat its first ones.
            self.study.sampler = kind(seed=derive_seed(SEED, "sweep", len(self.study.trials)) % 2**32)
            yield self._asked(self.sweep.space)

    def finish(self, run: Run) -> float:
        """Record the metric of a run that has ended well.

        Raises:
            ConfigError: it did not log the sweep's metric.
        """
        metrics, name = run.metrics(), self.sweep.metric.name
        if name not in metrics:
            raise ConfigError(
                f"metric={name!r} was not logged by {run.folder}; it logged {', '.join(metrics)}"
            )
        value = metrics[name]
        state = TrialState.FAIL if math.isnan(value) else TrialState.COMPLETE  # Optuna takes no NaN
        self.study.tell(run.number, None if math.isnan(value) else value, state)
        return value

    def ended(self) -> list[Run]:
        """Return the runs that have ended well, in the order of their numbers."""
        return [self._run(trial) for trial in self._kept() if trial.state.is_finished()]

    def _asked(self, space: dict[str, BaseDistribution]) -> Run:
        number = self.study.ask(space).number
        return self._run(self.study.trials[number])

    def _kept(self) -> list[FrozenTrial]:
        keys = self.sweep.space.keys()
        return [trial for trial in self.study.trials if self._values(trial).keys() == keys]

    def _values(self, trial: FrozenTrial) -> Values:
        return trial.user_attrs.get("values") or {key: str(value) for key, value in trial.params.items()}

    def _run(self, trial: FrozenTrial) -> Run:
        return Run(trial.number, self._values(trial), self.folder / f"{trial.number:04d}")


def compose(sweep: Sweep, values: Values, folder: Path) -> DictConfig:
    """Return the config of a run after the checks that fit makes.

    Raises:
        ConfigError: it does not compose, or the file names code that the command line does not trust.
    """
    cfg = composed("config", sweep.arguments(values, folder))
    HydraConfig.instance().set_config(cfg)  # for ${hydra:run.dir}
    choices, overrides = dict(cfg.hydra.runtime.choices), list(cfg.hydra.overrides.task)
    with open_dict(cfg):
        del cfg["hydra"]
    grant_trust(cfg, overrides)
    own: dict[str, str] = {}
    with suppress(ConfigError):  # the user's overrides may mean nothing without the file's
        own = user_code(composed("config", sweep.overrides).reward.functions)
    code = user_code(cfg.reward.functions)
    check_saved_code({name: cfg.reward.functions[name] for name in code if code[name] != own.get(name)})
    with initialized():
        check_keys(cfg, choices, overrides)
    return cfg


def check(sweep: Sweep) -> None:
    """Check every listed combination with the first seed, and each seed once, at both ends of all ranges.

    Raises:
        ConfigError: naming the combination that does not work.
    """
    first = sweep.cells[0]
    others = {key: value for key, value in first.items() if key != "seed"}
    cells = [
        cell
        for cell in sweep.cells
        if cell.get("seed") == first.get("seed") or others.items() <= cell.items()
    ]
    ranges = {key: each for key, each in sweep.space.items() if not isinstance(each, CategoricalDistribution)}
    ends = [{key: str(getattr(each, end)) for key, each in ranges.items()} for end in ("low", "high")]
    todo = [cell | end for cell in cells for end in (ends if ranges else [{}])]
    with track("check", len(todo), quiet_s=2.0) as advance:
        for values in todo:
            try:
                checked_config(compose(sweep, values, Path("unused")))
            except ConfigError as error:
                named = " ".join(f"{key}={value}" for key, value in values.items())
                raise ConfigError(f"{error} (in the run with {named})") from error
            advance()


def is_busy(folder: Path) -> bool:
    """True while a process works in the folder of a run, as one that a killed sweep has left."""
    try:
        with FolderLock() as lock:
            lock.take(folder)
    except BusyError:
        return True
    return False


@dataclass
class Workers:
    """Runs what a study has left, `n_jobs` processes of fit at a time."""

    study: SweepStudy
    n_jobs: int
    console: Console
    failed: list[Run] = field(default_factory=list)
    _alive: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _is_ending: bool = False

    def run(self) -> None:
        """Return when all runs have ended; on an error all processes save their run and end first."""
        self._todo, self._lock = self.study.unfinished(), threading.Lock()
        self._making: dict[Path, threading.Lock] = {}
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
        while True:
            with self._lock:
                run = None if self._is_ending else next(self._todo, None)
                if run is None:
                    return
                # Hydra composes one config at a time.
                cfg = checked_config(compose(self.study.sweep, run.values, run.folder))
                making = self._making.setdefault(sft_model_dir(cfg), threading.Lock())
            while is_busy(run.folder) and not self._is_ending:
                time.sleep(POLL_S)
            with making:  # of several runs with one SFT model the first trains it, and the others wait
                process = self._start(run)
                if process is None:
                    return
                while process.poll() is None and find_starting_model(cfg, run.folder) is None:
                    time.sleep(POLL_S)
            process.wait()
            with self._lock:
                self._alive.remove(process)
                if not self._is_ending:
                    self._end(run, process.returncode)

    def _start(self, run: Run) -> subprocess.Popen[bytes] | None:
        command = [sys.executable, "-m", "lit_rlkv.fit", *self.study.sweep.arguments(run.values, run.folder)]
        with self._lock, run.log.open("ab") as log:
            if self._is_ending:
                return None
            # A session of its own: Ctrl-C reaches the sweep alone, which then ends its runs.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"OMP_NUM_THREADS": "1"} | os.environ,
                start_new_session=True,
            )
            self._alive.append(process)
        return process

    def _end(self, run: Run, code: int) -> None:
        if code:
            self.failed.append(run)
            said = f"exit status {code}, see {run.log}"
        else:
            said = f"{self.study.sweep.metric.name} {self.study.finish(run):.4g}"
        named = "  ".join(f"{key}={value}" for key, value in run.values.items())
        self.console.print(
            f"run {run.number}: {named}  {said}", markup=False, highlight=False, soft_wrap=True
        )
