"""Progress of long tasks: a rich progress bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator, Mapping
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

N_PLAIN_LINES = 10
"""Number of plain lines per task without a terminal, at least; a slow task has more."""
MAX_SILENCE_S = 30.0
"""Seconds between the plain lines of a slow task."""
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

    Without a terminal there is a line for every tenth of the task, and after MAX_SILENCE_S without one.

    Args:
        quiet_s: seconds from the start in which nothing is shown, for a task that is mostly short.
    """

    def __init__(self, description: str, console: Console | None = None, *, quiet_s: float = 0.0) -> None:
        self.description = description
        self.console = console or stderr_console()
        self.quiet_s = quiet_s
        self._bars: Progress | None = None

    def start(self, n_done: int = 0, n_total: int | None = None) -> Progress:
        """Start the clock; `n_done` units are done already, and do not count for the speed."""
        if self._bars is not None:
            return self._bars
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            *([BarColumn(bar_width=None)] if self.console.is_interactive else []),
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
        self._tenths = n_done * N_PLAIN_LINES // (n_total or 1)
        self._last_line_at = time.monotonic()
        self._refresh(self._bars)
        return self._bars

    def show(self, n_done: float | int, n_total: int, fields: Mapping[str, Field]) -> None:
        """Show that `n_done` of `n_total` units are done, with more fields; units may be fractions."""
        bars = self.start()
        texts = {name: text if isinstance(text, str) else f"{text:.3g}" for name, text in fields.items()}
        text = "  ".join(f"{name} {shown}" for name, shown in texts.items())
        bars.update(bars.task_ids[0], completed=n_done, total=n_total, text=text)
        tenths = int(n_done) * N_PLAIN_LINES // n_total
        self._refresh(bars, is_due=tenths > self._tenths)
        self._tenths = tenths

    def show_phase(self, phase: str, n_done: float | int, n_total: int) -> None:
        """Show that `n_done` of `n_total` units of a phase are done; 0 starts it."""
        bars = self.start()
        if len(bars.tasks) == 1:
            bars.add_task("", text="")
        task = bars.tasks[1]
        if n_done == 0 or task.description.strip() != phase:
            bars.reset(task.id, total=n_total, description=f"  {phase}", text=UNITS.get(phase, ""))
        bars.update(task.id, completed=n_done, total=n_total)
        self._refresh(bars)

    def stop(self) -> None:
        """Stop the progress bars; a second call does nothing."""
        if self._bars is not None and self.console.is_interactive:  # elsewhere rich ends with an empty line
            for task in self._bars.task_ids[1:]:
                self._bars.remove_task(task)
            self._bars.stop()
        self._bars = None

    def _refresh(self, bars: Progress, *, is_due: bool = False) -> None:
        """Show the bars; without a terminal print the task if a line is due, or all bars after a silence."""
        now = time.monotonic()
        if (bars.tasks[0].elapsed or 0.0) < self.quiet_s:
            return
        if self.console.is_interactive:
            bars.start()
        elif is_due or now - self._last_line_at >= MAX_SILENCE_S:
            self.console.print(bars.make_tasks_table(bars.tasks[:1] if is_due else bars.tasks))
            self._last_line_at = now


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

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._meter.start(self._first, self._n_iterations)

    def on_phase_progress(self, phase: str, n_done: float | int, n_total: int) -> None:
        self._meter.show_phase(phase, n_done, n_total)

    def on_iteration_end(self, iteration: int, n_iterations: int, metrics: dict[str, float]) -> None:
        fields: dict[str, Field] = {}
        if "reward" in metrics:
            fields["reward"] = f"{metrics['reward']:.3f}"
        elif "loss" in metrics:
            fields["loss"] = metrics["loss"]
        if "tokens_per_second" in metrics:
            fields["tokens/s"] = f"{metrics['tokens_per_second']:,.0f}"
        self._meter.show(iteration, n_iterations, fields)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._meter.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._meter.stop()


class Tracker:
    """Counts the units of a task, or parts of the units to come, and shows its progress."""

    def __init__(self, meter: ProgressMeter, n_total: int) -> None:
        self._meter, self._n_total = meter, n_total
        self._n_done, self._n_parts = 0, 0
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
