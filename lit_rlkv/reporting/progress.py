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
    Task,
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

    A part of a unit is a fraction. Without a terminal there is a line for every tenth of the task, and after
    some seconds of silence.

    Args:
        quiet_s: seconds from the start in which nothing is shown, for a task that is mostly short.
    """

    def __init__(self, description: str, console: Console | None = None, *, quiet_s: float = 0.0) -> None:
        self.description = description
        self.console = console or stderr_console()
        self.quiet_s = quiet_s
        self._bars: Progress | None = None

    def start(self, n_done: int = 0, n_total: int | None = None) -> None:
        """Start the clock; `n_done` units are done already, and do not count for the speed."""
        if self._bars is not None:
            return
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            get_time=lambda: time.monotonic(),  # looked up at each call, for tests
            # Iterations may take minutes; rich's default of 30 seconds would show no remaining time.
            speed_estimate_period=float("inf"),
        )
        self._bars.add_task(self.description, total=n_total, completed=n_done, text="")
        self._n_before = n_done
        self._tenths = n_done * N_PLAIN_LINES // (n_total or 1)
        self._line: tuple[float | int, float] = (n_done, time.monotonic())
        """Units done and time of the last plain line."""
        self._has_lines = False
        if self.quiet_s == 0:
            self._show_bars()

    def show(self, n_done: float | int, n_total: int, fields: Mapping[str, Field]) -> None:
        """Show that `n_done` of `n_total` units are done, with more fields."""
        self.start()
        assert self._bars is not None
        task = self._bars.tasks[0]
        self._bars.update(task.id, completed=n_done, total=n_total, text=format_fields(fields))
        if (task.elapsed or 0.0) < self.quiet_s:
            return
        self._show_bars()
        tenths = int(n_done) * N_PLAIN_LINES // n_total
        is_due = tenths > self._tenths or n_done == n_total or self._is_silent()
        if is_due and n_done > self._line[0]:
            self._tenths = tenths
            self._print_line(self.description, task, self._n_before)
            self._line = (n_done, self._line[1])

    def show_phase(self, place: str, phase: str, n_done: float | int, n_total: int) -> None:
        """Show that `n_done` of `n_total` units of a phase are done; 0 starts it.

        Args:
            place: names the current unit of the task in a plain line.
        """
        self.start()
        assert self._bars is not None
        if len(self._bars.tasks) == 1:
            self._bars.add_task("", text="")
        task = self._bars.tasks[1]
        if n_done == 0 or task.description.strip() != phase:
            self._bars.reset(task.id, total=n_total, description=f"  {phase}", text=UNITS.get(phase, ""))
        self._bars.update(task.id, completed=n_done, total=n_total)
        if n_done > 0 and self._is_silent():
            self._print_line(f"in {place}  {phase}", task, 0)

    def stop(self) -> None:
        """Stop the progress bars; a second call does nothing."""
        if self._bars is not None and self.console.is_interactive:  # elsewhere rich ends with an empty line
            for task in self._bars.task_ids[1:]:
                self._bars.remove_task(task)
            self._bars.stop()
        self._bars = None

    def _show_bars(self) -> None:
        if self._bars is not None and self.console.is_interactive:
            self._bars.start()

    def _is_silent(self) -> bool:
        return time.monotonic() - self._line[1] >= (MAX_SILENCE_S if self._has_lines else FIRST_LINE_S)

    def _print_line(self, place: str, task: Task, n_before: float | int) -> None:
        """Print a line if there is no terminal, with the time of those units that were done here."""
        if self.console.is_interactive or task.total is None:
            return
        elapsed_s, n_here = task.elapsed or 0.0, task.completed - n_before
        left_s = elapsed_s / n_here * (task.total - task.completed) if n_here > 0 else 0.0
        times = f"{human_seconds(elapsed_s)} elapsed, {human_seconds(left_s)} left"
        unit = " " if task.id else "  "  # the unit of a phase stands at its numbers
        count = f"{_count(task.completed)}/{int(task.total)}"
        fields = f"{unit}{task.fields['text']}" if task.fields["text"] else ""
        self.console.print(f"{place} {count}{fields}  {times}", markup=False, highlight=False, soft_wrap=True)
        self._line, self._has_lines = (self._line[0], time.monotonic()), True


def _count(n: float | int) -> str:
    """Return a number of units with at most one decimal, rounded down: only what is done is whole."""
    return f"{int(n)}" if n == int(n) else f"{int(n * 10) / 10}"


class ProgressBar(RLCallback):
    """Shows the iterations done, with the last reward (or loss) and speed, and the progress of each phase.

    Args:
        first_iteration: iterations done before this process.
    """

    def __init__(
        self,
        description: str = "iteration",
        console: Console | None = None,
        n_iterations: int | None = None,
        first_iteration: int = 0,
    ) -> None:
        self._meter = ProgressMeter(description, console)
        self._n_iterations = n_iterations
        self._first = first_iteration
        self.iteration = first_iteration + 1
        """Iteration that has not ended yet, counted from 1."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._meter.start(self._first, self._n_iterations)

    def on_phase_progress(self, phase: str, n_done: float | int, n_total: int) -> None:
        of = "" if self._n_iterations is None else f"/{self._n_iterations}"
        self._meter.show_phase(f"{self._meter.description} {self.iteration}{of}", phase, n_done, n_total)

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
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


class StepProgressBar(ProgressBar):
    """Shows the optimizer steps done of the SFT stage, with the loss of the last iteration.

    Args:
        steps_done: optimizer steps done after each number of iterations, from 0 on.
        first_iteration: iterations done before this process.
    """

    def __init__(
        self, steps_done: Sequence[int], first_iteration: int = 0, console: Console | None = None
    ) -> None:
        super().__init__("sft step", console, steps_done[-1], steps_done[first_iteration])
        self._steps_done = steps_done
        self._n_before = self._first
        """Steps before the current iteration."""
        self._fields: dict[str, Field] = {}
        self._n_done: float | int = self._n_before

    @property
    def step(self) -> int:
        """Step that has not ended yet, counted from 1."""
        return min(int(self._n_done) + 1, self._steps_done[-1])

    def on_phase_progress(self, phase: str, n_done: float | int, n_total: int) -> None:
        self._n_done = self._n_before + n_done
        if 0 < n_done < n_total:  # the end of an iteration brings its loss
            self._meter.show(self._n_done, self._steps_done[-1], self._fields)

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        self._n_before = self._n_done = self._steps_done[iteration]
        self._fields = {"loss": metrics["loss"]} if "loss" in metrics else {}
        self._meter.show(self._n_done, self._steps_done[-1], self._fields)


class Tracker:
    """Counts the units of a task and shows its progress."""

    def __init__(self, meter: ProgressMeter, n_total: int) -> None:
        self._meter, self._n_total = meter, n_total
        self._n_done = self._n_parts = 0
        self._fields: Mapping[str, Field] = {}

    def __call__(self, n: int = 1, **fields: Field) -> None:
        """Count `n` further units, with their parts."""
        self._n_done, self._n_parts, self._fields = self._n_done + n, 0, fields
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
    meter.start(n_total=total)
    try:
        yield Tracker(meter, total)
    finally:
        meter.stop()


def format_fields(fields: Mapping[str, Field]) -> str:
    """Return fields as text, such as `loss 0.123  tokens 4,100`."""
    texts = {
        name: value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
        for name, value in fields.items()
    }
    return "  ".join(f"{name} {text}" for name, text in texts.items())
