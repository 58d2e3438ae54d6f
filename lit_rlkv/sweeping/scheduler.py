"""The loop of a sweep: start runs, watch them, stop those that fall behind, record how each ends."""

import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lit_rlkv.config import Config, ConfigError, parse_config, quoted
from lit_rlkv.reporting.progress import Field, ProgressMeter
from lit_rlkv.runs.lock import FolderLock
from lit_rlkv.runs.resume import is_done
from lit_rlkv.runs.starting_model import find_starting_model, sft_model_dir
from lit_rlkv.sweeping.job import OUTPUT, FitJob, Outcome, can_resume, is_locked
from lit_rlkv.sweeping.plan import Plan, Run, folder_override
from lit_rlkv.sweeping.study import SweepStudy

POLL_S = 0.5
"""Time between two looks at the running runs."""
N_TRIALS = 3
"""Number of failed runs after which a sweep gives up if none succeeds; at least the runs at a time."""


class FitLauncher:
    """Starts or resumes fit for each run, in a process of its own."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._configs: dict[int, Config] = {}

    def launch(self, run: Run) -> FitJob:
        """Start or resume a run, unless a process of a killed sweep works on it, or it is done.

        Raises:
            ConfigError: a process that no sweep started works in the folder.
        """
        folder = run.folder
        if is_locked(folder) or is_done(folder):
            return FitJob(folder)
        if can_resume(folder):
            resume = [f"resume={quoted(str(folder))}", folder_override(folder)]
            return FitJob.start(folder, [*resume, *self.plan.trust(run.values, folder)])
        with FolderLock() as lock:
            lock.take(folder)  # somebody may have resumed it by hand
            shutil.rmtree(folder, ignore_errors=True)
        return FitJob.start(folder, self.plan.arguments(run.values, folder))

    def must_wait(self, run: Run, running: Sequence[Run]) -> bool:
        """True if a running run makes the SFT model that this run needs too."""
        missing = self._sft_model_to_make(run)
        return missing is not None and any(self._sft_model_to_make(other) == missing for other in running)

    def _sft_model_to_make(self, run: Run) -> Path | None:
        if run.number not in self._configs:
            self._configs[run.number] = parse_config(self.plan.compose(run.values, run.folder).cfg)
        cfg = self._configs[run.number]
        return sft_model_dir(cfg) if find_starting_model(cfg, run.folder) is None else None


class Scheduler:
    """Runs the runs of a study, at most `n_jobs` at a time."""

    def __init__(
        self,
        study: SweepStudy,
        launcher: FitLauncher,
        console: Console,
        n_jobs: int = 1,
        poll_s: float = POLL_S,
    ) -> None:
        self.study = study
        self.launcher = launcher
        self.console = console
        self.n_jobs = n_jobs
        self.poll_s = poll_s
        self.metric = study.plan.sweep.metric
        self.hyperband = study.plan.sweep.hyperband
        self.ended = list(study.outcomes())
        self._jobs: dict[int, tuple[Run, FitJob]] = {}
        self._held: list[Run] = []
        self._n_failed = 0  # of the runs that ended since the sweep was started
        self._meter = ProgressMeter("sweep", console)

    def run(self, check: Callable[[], None] = lambda: None) -> None:
        """Run until every run has ended; on any error or interrupt, all processes are ended first.

        Args:
            check: called regularly, never while a run is being started; an exception from it ends the sweep.

        Raises:
            ConfigError: the runs do not log the sweep's metric, or the first of them all fail.
        """
        self._meter.start(n_done=len(self.ended), n_total=self.study.n_runs)
        try:
            self._start_some()
            while self._jobs:
                check()
                for run, job in list(self._jobs.values()):
                    self._look_at(run, job)
                self._start_some()
                if self.console.is_interactive:
                    self._show()
                time.sleep(self.poll_s)
        finally:
            self._stop_all()
            self._meter.stop()

    def _start_some(self) -> None:
        while len(self._jobs) < self.n_jobs and (run := self._next()) is not None:
            self._jobs[run.number] = (run, self.launcher.launch(run))

    def _next(self) -> Run | None:
        if any(self.metric.is_reached(value) for value in self._values()):
            return None
        running = [run for run, _ in self._jobs.values()]
        for run in self._held:
            if not self.launcher.must_wait(run, running):
                self._held.remove(run)
                return run
        while len(self._held) < self.n_jobs and (new := self.study.next_run()) is not None:
            if not self.launcher.must_wait(new, running):
                return new
            self._held.append(new)
        return None

    def _look_at(self, run: Run, job: FitJob) -> None:
        if not job.is_running:
            self._end(run, job.outcome(self.metric.name))
            return
        bracket = self._falls_behind(run, job)
        if bracket is not None:
            job.ask_to_stop()
            job.wait()
            outcome = job.outcome(self.metric.name)
            if outcome.state != "finished":
                outcome = replace(outcome, state="stopped", reason=f"behind at {bracket}")
            self._end(run, outcome)

    def _falls_behind(self, run: Run, job: FitJob) -> int | None:
        if self.hyperband is None:
            return None
        name, cost = self.metric.name, self.metric.cost
        others = [other.history(name) for number, (_, other) in self._jobs.items() if number != run.number]
        folders = {other.folder for other, _ in self._jobs.values()}  # one that failed may be tried again
        rivals = [*others, *(how.history for other, how in self.ended if other.folder not in folders)]
        return self.hyperband.stops(
            [cost(value) for value in job.history(name)],
            [[cost(value) for value in rival] for rival in rivals],
        )

    def _end(self, run: Run, outcome: Outcome) -> None:
        self.study.finish(run, outcome)
        self.ended = [(other, how) for other, how in self.ended if other.folder != run.folder]
        self.ended.append((run, outcome))
        del self._jobs[run.number]
        named = "  ".join(f"{name}={value}" for name, value in run.values.items())
        value = outcome.metrics.get(self.metric.name, math.nan)
        line = f"run {run.number} {outcome.state}: {named}  {self.metric.name} {value:.4g}  {outcome.reason}"
        self.console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
        self._show()
        self._n_failed += outcome.state == "failed"
        self._check_progress(run, outcome)

    def _check_progress(self, run: Run, outcome: Outcome) -> None:
        if outcome.state == "finished" and not self._values():
            raise ConfigError(
                f"metric={self.metric.name!r} was not logged by run {run.number}, which has finished; it "
                f"logged {', '.join(sorted(outcome.metrics))}"
            )
        n_left = self.study.n_runs - len(self.ended)
        all_failed = all(how.state == "failed" for _, how in self.ended)
        if all_failed and self._n_failed >= max(N_TRIALS, self.n_jobs) and n_left > 0:
            raise ConfigError(
                f"the first {self._n_failed} runs all failed, so the {n_left} others are not tried; see "
                f"{run.folder / OUTPUT}, and start the sweep again once its cause is gone"
            )

    def _values(self) -> list[float]:
        """Return the metric of every finished run."""
        finished = [outcome.metrics for _, outcome in self.ended if outcome.state == "finished"]
        return [metrics[self.metric.name] for metrics in finished if self.metric.name in metrics]

    def _show(self) -> None:
        fields: dict[str, Field] = {}
        if values := [value for value in self._values() if math.isfinite(value)]:
            fields["best"] = min(values, key=self.metric.cost)
        if self._jobs:
            counts = {number: len(job.history("iteration")) for number, (_, job) in self._jobs.items()}
            fields["running"] = ", ".join(f"#{number} at {count}" for number, count in counts.items())
        self._meter.show(len(self.ended), self.study.n_runs, fields)

    def _stop_all(self) -> None:
        for _, job in self._jobs.values():
            job.ask_to_stop()
        for _, job in self._jobs.values():
            job.wait()


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Delay SIGINT and SIGTERM until the yielded function is called, which then raises KeyboardInterrupt.

    So no signal comes between the start of a process and its record. A second signal is not delayed.
    """
    came: list[int] = []

    def hold(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    def let_through() -> None:
        if came:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, hold) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield let_through
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
