"""The sweep itself: start runs, watch them, stop those that fall behind, write down how each ends."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from lit_rlkv.callbacks.progress import Field, Meter
from lit_rlkv.config import ConfigError
from lit_rlkv.sweeping.job import Job, Outcome
from lit_rlkv.sweeping.launcher import Launcher
from lit_rlkv.sweeping.ledger import Ledger
from lit_rlkv.sweeping.plan import Run

POLL_S = 0.5
"""Between two looks at the runs under way."""


class Scheduler:
    """Runs what the ledger gives out, so many at a time."""

    def __init__(
        self, ledger: Ledger, launcher: Launcher, console: Console, n_jobs: int = 1, poll_s: float = POLL_S
    ) -> None:
        self.ledger = ledger
        self.launcher = launcher
        self.console = console
        self.n_jobs = n_jobs
        self.poll_s = poll_s
        self.metric = ledger.plan.sweep.metric
        self.hyperband = ledger.plan.sweep.hyperband
        self.ended = list(ledger.outcomes())
        self._jobs: dict[int, tuple[Run, Job]] = {}
        self._held: list[Run] = []
        self._meter = Meter("sweep", console)

    def run(self, check: Callable[[], None] = lambda: None) -> None:
        """Until every run has ended; whatever ends it earlier, no process is left behind.

        Args:
            check: called now and then, while no run is being started; what it raises ends the sweep.

        Raises:
            ConfigError: the runs do not log the sweep's metric.
        """
        self._meter.start(n_done=len(self.ended), n_total=self.ledger.n_runs)
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
        while len(self._held) < self.n_jobs and (new := self.ledger.next_run()) is not None:
            if not self.launcher.must_wait(new, running):
                return new
            self._held.append(new)
        return None

    def _look_at(self, run: Run, job: Job) -> None:
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

    def _falls_behind(self, run: Run, job: Job) -> int | None:
        if self.hyperband is None:
            return None
        name, cost = self.metric.name, self.metric.cost
        others = [other.history(name) for number, (_, other) in self._jobs.items() if number != run.number]
        rivals = [*others, *(outcome.history for _, outcome in self.ended)]
        return self.hyperband.stops(
            [cost(value) for value in job.history(name)],
            [[cost(value) for value in rival] for rival in rivals],
        )

    def _end(self, run: Run, outcome: Outcome) -> None:
        self.ledger.finish(run, outcome)
        self.ended = [(other, how) for other, how in self.ended if other.folder != run.folder]
        self.ended.append((run, outcome))
        del self._jobs[run.number]
        told = "  ".join(f"{name}={value}" for name, value in run.values.items())
        value = outcome.metrics.get(self.metric.name, math.nan)
        line = f"run {run.number} {outcome.state}: {told}  {self.metric.name} {value:.4g}  {outcome.reason}"
        self.console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
        self._show()
        if outcome.state == "finished" and not self._values():
            raise ConfigError(
                f"metric={self.metric.name!r} was not logged by run {run.number}, which has finished; it "
                f"logged {', '.join(sorted(outcome.metrics))}"
            )

    def _values(self) -> list[float]:
        """The metric of every run that finished."""
        finished = [outcome.metrics for _, outcome in self.ended if outcome.state == "finished"]
        return [metrics[self.metric.name] for metrics in finished if self.metric.name in metrics]

    def _show(self) -> None:
        fields: dict[str, Field] = {}
        if values := self._values():
            fields["best"] = min(values, key=self.metric.cost)
        if self._jobs:
            counts = {number: len(job.history("iteration")) for number, (_, job) in self._jobs.items()}
            fields["running"] = ", ".join(f"#{number} at {count}" for number, count in counts.items())
        self._meter.show(len(self.ended), self.ledger.n_runs, fields)

    def _stop_all(self) -> None:
        for _, job in self._jobs.values():
            job.ask_to_stop()
        for _, job in self._jobs.values():
            job.wait()
