"""Progress of long tasks: a rich progress bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.interrupts import is_first_process
from lit_rlkv.units import human_seconds

N_PLAIN_LINES = 10
"""Number of plain lines per task without a terminal, at least; a slow task has more."""
FIRST_LINE_S, MAX_SILENCE_S = 5.0, 60.0
"""Seconds until a slow task has its first plain line, and between its other lines."""
QUIET_S = 2.0
"""Seconds after which checks that are mostly short show their progress."""
UNITS = {
    "rollout": "tokens",
    "score": "responses",
    "reward": "scores",
    "diagnostics": "callbacks",
    "update": "steps",
}
"""Units of the phases of an iteration, as `RLCallback.on_phase_progress` counts them."""

Field = float | int | str


@cache
def stderr_console() -> Console:
    """Return the shared console; printing on another one would break the progress bar."""
    return Console(stderr=True, markup=False, emoji=False, quiet=not is_first_process())


def say(console: Console, text: str, *, stage: str = "") -> None:
    """Print a line behind the name of a stage; brackets in paths and names of users are no markup."""
    console.print(Text.assemble((stage, "bold"), " " if stage and text else "", text), soft_wrap=True)


class ProgressMeter:
    """Progress of one task, from `start` (or the first `show`) to `stop`, and of a phase of its current unit.

    A part of a unit is a fraction.

    Args:
        quiet_s: seconds from the start in which nothing is shown, for a task that is mostly short.
    """

    def __init__(self, description: str, console: Console | None = None, *, quiet_s: float = 0.0) -> None:
        self.description = description
        self.console = console or stderr_console()
        self.quiet_s = quiet_s
        self._bar: Progress | None = None
        self._started_at: float | None = None
        self._first_n_done: float | int | None = None
        self._n_lines = 0
        self._said: tuple[float | int, float] = (0, 0.0)
        """Units done and time of the last plain line."""
        self._has_lines = False
        self._is_first_unit = True
        """True until a unit is done here; only then each slow phase has a plain line of its own."""
        self._phase: tuple[str, float] = ("", 0.0)
        """Name and start of the current phase."""
        self._said_phase = ""
        """Last phase with a plain line."""

    def start(self, n_done: int | None = None, n_total: int | None = None) -> None:
        """Start the clock; `n_done` units are done already (None: one less than the first `show` reports)."""
        if self._started_at is not None:
            return
        self._started_at = time.monotonic()
        self._first_n_done = n_done
        self._said = (n_done or 0, self._started_at)
        self._n_lines = (n_done or 0) * N_PLAIN_LINES // (n_total or 1)
        if self.quiet_s == 0:
            self._open_bar(n_done or 0, n_total)

    def _open_bar(self, n_done: int, n_total: int | None) -> None:
        if self.console.is_interactive:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[fields]}", markup=False),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
                # Iterations may take minutes; rich's default of 30 seconds would show no remaining time.
                speed_estimate_period=float("inf"),
            )
            self._bar.add_task(self.description, total=n_total, completed=n_done, fields="")
            self._bar.start()

    def show(self, n_done: float | int, n_total: int, fields: Mapping[str, Field]) -> None:
        """Show that `n_done` of `n_total` units are done, with more fields."""
        self.start()
        if self._first_n_done is None:
            self._first_n_done = n_done - 1
        self._is_first_unit = n_done - self._first_n_done < 1
        assert self._started_at is not None
        if self.quiet_s > 0 and self._bar is None:
            if time.monotonic() - self._started_at < self.quiet_s:
                return
            self._open_bar(int(n_done), n_total)
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=n_done, total=n_total, fields=format_fields(fields))
            return
        n_due, now = int(n_done) * N_PLAIN_LINES // n_total, time.monotonic()
        last_n_done, last_at = self._said
        silence_s = MAX_SILENCE_S if self._has_lines else FIRST_LINE_S
        is_due = n_due > self._n_lines or n_done == n_total or now - last_at >= silence_s
        if is_due and n_done > last_n_done:
            self._n_lines, self._said = n_due, (n_done, now)
            place = f"{self.description} {_count(n_done)}/{n_total}"
            n_done_here = n_done - self._first_n_done
            self._print_line(place, now - self._started_at, n_done_here, n_total - n_done, fields)

    def show_phase(self, place: str, phase: str, n_done: float | int, n_total: int) -> None:
        """Show that `n_done` of `n_total` units of a phase are done; 0 starts it.

        Args:
            place: names the current unit of the task in a plain line.
        """
        self.start()
        unit, now = UNITS.get(phase, ""), time.monotonic()
        if n_done == 0 or phase != self._phase[0]:
            self._phase = phase, now
        if self._bar is not None:
            if len(self._bar.task_ids) == 1:
                self._bar.add_task("", fields="")
            task = self._bar.task_ids[1]
            if n_done == 0:
                self._bar.reset(task, total=n_total, description=f"  {phase}", fields=unit)
            self._bar.update(task, completed=n_done, total=n_total, description=f"  {phase}", fields=unit)
            return
        elapsed_s = now - self._phase[1]
        is_new = self._said_phase != phase and self._is_first_unit
        is_due = (is_new and elapsed_s >= FIRST_LINE_S) or now - self._said[1] >= MAX_SILENCE_S
        if is_due and n_done > 0:
            self._said, self._said_phase = (self._said[0], now), phase
            place = f"in {place}  {phase} {_count(n_done)}/{n_total} {unit}".rstrip()
            self._print_line(place, elapsed_s, n_done, n_total - n_done, {})

    def stop(self) -> None:
        """Stop the progress bar; a second call does nothing."""
        if self._bar is not None:
            for task in self._bar.task_ids[1:]:
                self._bar.remove_task(task)
            self._bar.stop()
        self._bar = None
        self._started_at = None
        self._n_lines = 0
        self._has_lines = False

    def _print_line(
        self,
        place: str,
        elapsed_s: float,
        n_done: float | int,
        n_left: float | int,
        fields: Mapping[str, Field],
    ) -> None:
        left_s = elapsed_s / n_done * n_left if n_done > 0 else 0.0
        times = f"{human_seconds(elapsed_s)} elapsed, {human_seconds(left_s)} left"
        line = "  ".join(part for part in (place, format_fields(fields), times) if part)
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._has_lines = True


def _count(n: float | int) -> str:
    """Return a number of units with at most one decimal, rounded down: only what is done is whole."""
    return f"{int(n)}" if n == int(n) else f"{int(n * 10) / 10}"


class ProgressBar(RLCallback):
    """Shows the iterations done, with the last reward (or loss) and speed, and the progress of each phase.

    Args:
        first_iteration: iterations done before this process; None: one less than the first that ends.
    """

    def __init__(
        self,
        description: str = "iteration",
        console: Console | None = None,
        n_iterations: int | None = None,
        first_iteration: int | None = None,
    ) -> None:
        self._meter = ProgressMeter(description, console)
        self._n_iterations = n_iterations
        self._first = first_iteration
        self.iteration = (first_iteration or 0) + 1
        """Iteration that has not ended yet, counted from 1."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._meter.start(self._first, self._n_iterations)

    def on_phase_progress(self, phase: str, n_done: float | int, n_total: int) -> None:
        of = "" if self._n_iterations is None else f"/{self._n_iterations}"
        self._meter.show_phase(f"{self._meter.description} {self.iteration}{of}", phase, n_done, n_total)

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        """Show the iteration; iterations before a resume do not count for the speed."""
        fields: dict[str, Field] = {}
        if "reward" in metrics:
            fields["reward"] = f"{metrics['reward']:.3f}"
        elif "loss" in metrics:
            fields["loss"] = metrics["loss"]
        if "tokens_per_second" in metrics:
            fields["tokens/s"] = f"{metrics['tokens_per_second']:,.0f}"
        self._meter.show(iteration, n_iterations, fields)
        self.iteration = min(iteration + 1, n_iterations)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._meter.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._meter.stop()


class StepProgressBar(RLCallback):
    """Shows the optimizer steps done of the SFT stage, with the loss of the last iteration.

    Args:
        steps_done: optimizer steps done after each number of iterations, from 0 on.
        first_iteration: iterations done before this process.
    """

    def __init__(
        self, steps_done: Sequence[int], first_iteration: int = 0, console: Console | None = None
    ) -> None:
        self._meter = ProgressMeter("sft step", console)
        self._steps_done = steps_done
        self._n_before = steps_done[first_iteration]
        """Steps before the current iteration."""
        self._n_done: float | int = self._n_before
        self._fields: dict[str, Field] = {}

    @property
    def step(self) -> int:
        """Step that has not ended yet, counted from 1."""
        return min(int(self._n_done) + 1, self._steps_done[-1])

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._meter.start(self._n_before, self._steps_done[-1])

    def on_phase_progress(self, phase: str, n_done: float | int, n_total: int) -> None:
        self._n_done = self._n_before + n_done
        if 0 < n_done < n_total:  # the end of an iteration brings its loss
            self._meter.show(self._n_done, self._steps_done[-1], self._fields)

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        self._n_before = self._n_done = self._steps_done[iteration]
        self._fields = {"loss": metrics["loss"]} if "loss" in metrics else {}
        self._meter.show(self._n_done, self._steps_done[-1], self._fields)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._meter.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._meter.stop()


class Tracker:
    """Counts the units of a task and shows its progress."""

    def __init__(self, meter: ProgressMeter, n_total: int) -> None:
        self._meter = meter
        self._n_total = n_total
        self._n_done = 0
        self._n_parts = 0
        self._fields: Mapping[str, Field] = {}

    def __call__(self, n: int = 1, **fields: Field) -> None:
        """Count `n` further units, with their parts."""
        self._n_done += n
        self._n_parts = 0
        self._fields = fields
        self._meter.show(self._n_done, self._n_total, fields)

    def within(self, n: int, n_total: int) -> None:
        """Count `n` further parts of the units to come, of which each has `n_total`."""
        self._n_parts += n
        self._meter.show(self._n_done + self._n_parts / n_total, self._n_total, self._fields)


@contextmanager
def track(
    description: str, total: int, console: Console | None = None, *, quiet_s: float = 0.0
) -> Iterator[Tracker]:
    """Show the progress of a task of `total` units; yields the function that counts them."""
    meter = ProgressMeter(description, console, quiet_s=quiet_s)
    meter.start(n_done=0, n_total=total)
    try:
        yield Tracker(meter, total)
    finally:
        meter.stop()


def format_fields(fields: Mapping[str, Field]) -> str:
    """Return fields as text, such as `loss 0.123  tokens/s 4,100`."""

    def text(value: Field) -> str:
        if isinstance(value, str):
            return value
        return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"

    return "  ".join(f"{name} {text(value)}" for name, value in fields.items())
