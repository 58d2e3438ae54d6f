"""The results of a sweep: a table of means over seeds, a file of all runs, and Optuna's figures."""

import csv
import io
import math
import re
import statistics
import warnings
from pathlib import Path

import matplotlib as mpl
import optuna
from optuna.distributions import CategoricalDistribution
from rich.table import Table
from rich.text import Text

from lit_rlkv.files import write_atomically
from lit_rlkv.sweeping.runs import SweepRun, SweepStudy
from lit_rlkv.sweeping.sweep_file import Sweep

TABLE, FIGURES = "results.csv", ("history.png", "parameters.png")
BESIDE = ("eval/accuracy", "eval/reward", "eval/dense_accuracy", "eval/kl")
"""Metrics that the table shows beside the sweep's own."""


def mean_sd(values: list[float]) -> str:
    """Return mean and sample standard deviation of the finite values, such as `0.812 ± 0.031`."""
    values = [value for value in values if math.isfinite(value)]
    if len(values) < 2:
        return f"{values[0]:.4g}" if values else "–"
    return f"{statistics.fmean(values):.4g} ± {statistics.stdev(values):.2g}"


def results_table(sweep: Sweep, ended: list[SweepRun]) -> Table:
    """Return a table with a row for each combination but for its seed, the best first.

    Those without a value of the sweep's metric are last.
    """
    together: dict[tuple[str, ...], list[dict[str, float]]] = {}
    keys = [key for key in sweep.space if key != "seed"]
    for run in ended:
        together.setdefault(tuple(run.values[key] for key in keys), []).append(run.metrics())
    name = sweep.metric.name
    sign = -1 if sweep.metric.goal == "maximize" else 1

    def rank(row: tuple[object, list[dict[str, float]]]) -> float:
        values = [value for each in row[1] if math.isfinite(value := each.get(name, math.nan))]
        return sign * statistics.fmean(values) if values else math.inf

    rows = sorted(together.items(), key=rank)
    logged = {each for _, found in rows for metrics in found for each in metrics}
    metrics = [each for each in dict.fromkeys((name, *BESIDE)) if each in logged]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in (*keys, "runs", *metrics):
        table.add_column(Text(heading))
    for values, found in rows:
        cells = [mean_sd([each[metric] for each in found if metric in each]) for metric in metrics]
        table.add_row(*(Text(cell) for cell in (*map(_short, values), str(len(found)), *cells)))
    return table


def _short(value: str) -> str:
    return f"{float(value):.4g}" if re.fullmatch(r"-?\d*\.\d{5,}(e-?\d+)?", value) else value


def write_results(study: SweepStudy) -> list[Path]:
    """Write parameters and metrics of all ended runs, draw Optuna's figures of those with a value.

    Returns the files.
    """
    ended, space, folder = study.ended(), study.sweep.space, study.folder
    rows = [{"folder": run.folder.name, **run.values, **run.metrics()} for run in ended]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(folder / TABLE, text.getvalue())
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from optuna.visualization import matplotlib as drawn

    shown = optuna.create_study(direction=study.sweep.metric.goal)
    valued = [(run, value) for run in ended if (value := run.value(study.sweep.metric.name)) is not None]
    if not valued:
        return [folder / TABLE]
    for run, value in valued:
        params = {
            key: run.values[key]
            if isinstance(each, CategoricalDistribution)
            else each.to_external_repr(float(run.values[key]))
            for key, each in space.items()
        }
        shown.add_trial(optuna.create_trial(params=params, distributions=space, value=value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its figures are experimental, and a run alone has no range
        name = study.sweep.metric.name
        drawn.plot_optimization_history(shown, target_name=name)
        plt.savefig(folder / FIGURES[0], dpi=150, bbox_inches="tight")
        drawn.plot_slice(shown, target_name=name)
        plt.savefig(folder / FIGURES[1], dpi=150, bbox_inches="tight")
        plt.close("all")
    return [folder / name for name in (TABLE, *FIGURES)]
