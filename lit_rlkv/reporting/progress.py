"""Progress of long tasks: a rich progress bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.units import human_seconds

N_PLAIN_LINES = 10
"""Number of plain lines per task without a terminal, at least; a slow task has one every MAX_SILENCE_S."""
MAX_SILENCE_S = 60.0

WIDEST_PHASE = len("rollout")

Field = float | int | str


@cache
def stderr_console() -> Console:
    """Return the shared console; printing on another one would break the progress bar."""
    return Console(stderr=True)


class ProgressMeter:
    """Progress of one task, from `start` (or the first `show`) to `stop`."""

    def __init__(self, description: str, console: Console | None = None) -> None:
        self.description = description
        self.console = console or stderr_console()
        self._bar: Progress | None = None
        self._started_at: float | None = None
        self._first_n_done: int | None = None
        self._n_lines = 0
        self._said: tuple[int, float] = (0, 0.0)
        """Units done and time of the last plain line."""

    def start(self, n_done: int | None = None, n_total: int | None = None) -> None:
        """Start the clock; `n_done` units are done already (None: one less than the first `show` reports)."""
        if self._started_at is not None:
            return
        self._started_at = time.monotonic()
        self._first_n_done = n_done
        self._said = (n_done or 0, self._started_at)
        self._n_lines = (n_done or 0) * N_PLAIN_LINES // (n_total or 1)
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
            self._bar.add_task(self.description, total=n_total, completed=n_done or 0, fields="")
            self._bar.start()

    def show(self, n_done: int, n_total: int, fields: Mapping[str, Field]) -> None:
        """Show that `n_done` of `n_total` units are done, with more fields."""
        self.start()
        if self._first_n_done is None:
            self._first_n_done = n_done - 1
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=n_done, total=n_total, fields=format_fields(fields))
            return
        n_due, now = n_done * N_PLAIN_LINES // n_total, time.monotonic()
        last_n_done, last_at = self._said
        is_due = n_due > self._n_lines or n_done == n_total or now - last_at >= MAX_SILENCE_S
        if is_due and n_done > last_n_done:
            self._n_lines, self._said = n_due, (n_done, now)
            self._print_line(n_done, n_total, fields, now)

    def note(self, text: str) -> None:
        """Show a word beside a bar; without a terminal nothing is printed."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], fields=text)

    def stop(self) -> None:
        """Stop the progress bar; a second call does nothing."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = None
        self._started_at = None
        self._n_lines = 0

    def _print_line(self, n_done: int, n_total: int, fields: Mapping[str, Field], now: float) -> None:
        assert self._started_at is not None
        assert self._first_n_done is not None
        elapsed_s = now - self._started_at
        n_done_here = n_done - self._first_n_done
        left_s = elapsed_s / n_done_here * (n_total - n_done) if n_done_here > 0 else 0.0
        times = f"{human_seconds(elapsed_s)} elapsed, {human_seconds(left_s)} left"
        parts = [f"{self.description} {n_done}/{n_total}", format_fields(fields), times]
        line = "  ".join(part for part in parts if part)
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class ProgressBar(RLCallback):
    """Shows the iterations done, with the phase, the last reward (or loss) and speed.

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
        self._fields = ""
        self.iteration = (first_iteration or 0) + 1
        """Iteration that has not ended yet, counted from 1."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._meter.start(self._first, self._n_iterations)

    def on_phase_start(self, phase: str, iteration: int) -> None:
        self._meter.note(f"{phase:<{WIDEST_PHASE}}  {self._fields}".rstrip())

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        """Show the iteration; iterations before a resume do not count for the speed."""
        fields: dict[str, Field] = {}
        if "reward" in metrics:
            fields["reward"] = f"{metrics['reward']:.3f}"
        elif "loss" in metrics:
            fields["loss"] = metrics["loss"]
        if "tokens_per_second" in metrics:
            fields["tokens/s"] = f"{metrics['tokens_per_second']:,.0f}"
        self._fields = format_fields(fields)
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
        self._n_done = steps_done[first_iteration]
        self._fields: dict[str, Field] = {}

    @property
    def step(self) -> int:
        """Step that has not ended yet, counted from 1."""
        return min(self._n_done + 1, self._steps_done[-1])

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._meter.start(self._n_done, self._steps_done[-1])

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._n_done += 1
        if self._n_done not in self._steps_done:  # the end of an iteration brings its loss
            self._meter.show(self._n_done, self._steps_done[-1], self._fields)

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        self._n_done = self._steps_done[iteration]  # a step with a non-finite gradient was skipped
        self._fields = {"loss": metrics["loss"]} if "loss" in metrics else {}
        self._meter.show(self._n_done, self._steps_done[-1], self._fields)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._meter.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._meter.stop()


@contextmanager
def track(description: str, total: int, console: Console | None = None) -> Iterator[Callable[..., None]]:
    """Show the progress of a task of `total` units; yields `advance(n, **fields)` to count units."""
    meter = ProgressMeter(description, console)
    n_done = 0

    def advance(n: int = 1, **fields: Field) -> None:
        nonlocal n_done
        n_done += n
        meter.show(n_done, total, fields)

    meter.start(n_done=0, n_total=total)
    try:
        yield advance
    finally:
        meter.stop()


def format_fields(fields: Mapping[str, Field]) -> str:
    """Return fields as text, such as `loss 0.123  tokens/s 4,100`."""

    def text(value: Field) -> str:
        if isinstance(value, str):
            return value
        return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"

    return "  ".join(f"{name} {text(value)}" for name, value in fields.items())
