"""Results of a sweep: files with every run, and a table of means over seeds."""

import csv
import io
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lit_rlkv.files import write_atomically
from lit_rlkv.reporting.tables import ABSENT
from lit_rlkv.sweeping.job import Outcome
from lit_rlkv.sweeping.metric import Metric
from lit_rlkv.sweeping.parameters import Parameter
from lit_rlkv.sweeping.plan import Run
from lit_rlkv.sweeping.sweep_file import Sweep

ROWS, TABLE = "results.jsonl", "results.csv"
ABOUT = ("run", "state", "folder")
"""Columns of a run beside its parameters and metrics."""
BESIDE = ("eval/accuracy", "eval/dense_accuracy", "eval/kl")
"""Metrics that the table shows beside the sweep's own."""
N_ROWS = 20
"""Best settings of a search to show; the files hold all."""

Ended = Sequence[tuple[Run, Outcome]]


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed."""

    values: dict[str, Any]
    """Values of the other parameters."""
    outcomes: list[Outcome]

    def found(self, metric: str) -> list[float]:
        """Return the metric of the finished runs."""
        finished = [outcome.metrics for outcome in self.outcomes if outcome.state == "finished"]
        return [metrics[metric] for metrics in finished if metric in metrics]

    def n_of(self, state: str) -> int:
        """Return the number of runs that ended in this state."""
        return sum(outcome.state == state for outcome in self.outcomes)


def settings(ended: Ended) -> list[Setting]:
    """Group runs by their values without the seed, in the order of their numbers."""
    together: dict[str, Setting] = {}
    for run, outcome in sorted(ended, key=lambda pair: pair[0].number):
        values = {name: value for name, value in run.values.items() if name != "seed"}
        together.setdefault(repr(values), Setting(values, [])).outcomes.append(outcome)
    return list(together.values())


def without_seed(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return the parameters that make a setting: all but the seed, over which results are averaged."""
    return [parameter for parameter in parameters if parameter.name != "seed"]


def best_first(found: Sequence[Setting], metric: Metric) -> list[Setting]:
    """Sort settings by their mean; settings without a finished run come last."""

    def cost(setting: Setting) -> float:
        values = setting.found(metric.name)
        found = metric.cost(sum(values) / len(values)) if values else math.inf
        return math.inf if math.isnan(found) else found

    return sorted(found, key=cost)


def mean_sd(values: Sequence[float]) -> str:
    """Return `0.812 ± 0.031`: mean and sample standard deviation, with two digits of the deviation.

    One value has no deviation. A value that is not finite is not left out, so the mean is not finite either.
    """
    if not values:
        return ABSENT
    mean = sum(values) / len(values)
    if not math.isfinite(mean):
        return f"{mean:.4g}"
    sd = statistics.stdev(values) if len(values) > 1 else 0.0
    if not sd > 0:
        return f"{mean:.4g}" + (" ± 0" if len(values) > 1 else "")
    n_digits = max(0, 1 - math.floor(math.log10(sd)))
    return f"{mean:.{n_digits}f} ± {sd:.{n_digits}f}"


def results_table(sweep: Sweep, ended: Ended) -> Table:
    """Return a table with a row for each setting: a grid in its order, a search from best to worst."""
    found = settings(ended)
    ranked = best_first(found, sweep.metric)
    names = dict.fromkeys((sweep.metric.name, *BESIDE))
    metrics = [name for name in names if any(setting.found(name) for setting in found)]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    headings = columns_of(sweep, ended)
    swept = [parameter.name for parameter in without_seed(sweep.parameters)]
    for name in swept:
        table.add_column(Text(headings[name]))
    for heading in ("runs", *metrics):
        table.add_column(Text(heading), justify="right")
    for setting in found if sweep.method == "grid" else ranked[:N_ROWS]:
        is_best = setting is ranked[0] and bool(setting.found(sweep.metric.name))
        cells = [_short(setting.values[name]) for name in swept]
        cells += [_counts(setting), *(mean_sd(setting.found(name)) for name in metrics)]
        table.add_row(*(Text(cell) for cell in cells), style="bold" if is_best else "")
    return table


def columns_of(sweep: Sweep, ended: Ended) -> dict[str, str]:
    """Return the heading of each parameter, with `parameters.` before it if a metric has the same name."""
    taken = {*ABOUT, sweep.metric.name}.union(*(outcome.metrics for _, outcome in ended))
    names = [parameter.name for parameter in sweep.parameters]
    return {name: f"parameters.{name}" if name in taken else name for name in names}


def write_results(folder: Path, sweep: Sweep, ended: Ended) -> None:
    """Write every ended run with its parameters and metrics, as CSV and as JSON lines."""
    headings = columns_of(sweep, ended)
    lines, flat = [], []
    for run, outcome in sorted(ended, key=lambda pair: pair[0].number):
        row = dict(zip(ABOUT, (run.number, outcome.state, run.folder.name), strict=True))
        inner = {"values": run.values, "metrics": outcome.metrics, "reason": outcome.reason}
        lines.append(json.dumps(row | inner))
        flat.append({headings[name]: value for name, value in run.values.items()} | row | outcome.metrics)
    write_atomically(folder / ROWS, "".join(f"{line}\n" for line in lines))
    text = io.StringIO(newline="")
    first = (*headings.values(), sweep.metric.name, *ABOUT)
    writer = csv.DictWriter(text, list(dict.fromkeys((*first, *(name for row in flat for name in row)))))
    writer.writeheader()
    writer.writerows(flat)
    write_atomically(folder / TABLE, text.getvalue())


def _counts(setting: Setting) -> str:
    """Return the number of finished runs, and of the others by state."""
    others = [f"{setting.n_of(state)} {state}" for state in ("stopped", "failed") if setting.n_of(state)]
    return ", ".join([str(setting.n_of("finished")), *others])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
