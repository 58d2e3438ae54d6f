"""Curves of logged metrics, and accuracies against the budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from lit_rlkv.evaluation.intervals import accuracy_interval
from lit_rlkv.evaluation.results import EvalRow
from lit_rlkv.reporting.plots import style
from lit_rlkv.reporting.plots.style import Dashes
from lit_rlkv.reporting.run_metrics import History


@dataclass(frozen=True)
class CurveSet:
    """Metrics of one unit, which one figure shows of a run; a comparison shows some, in a figure each."""

    title: str
    caption: str
    y_label: str
    metrics: Mapping[str, str]
    """Legend entry of each metric."""
    axis: Literal["free", "from zero", "percent", "share", "log", "log percent"] = "free"
    scale: float = 1.0
    """Factor from the logged unit to that of the axis."""
    compared: Sequence[str] = ()
    """Metrics that a comparison shows; if none of them was logged, it shows the first that was."""

    def logged(self, *histories: History) -> list[str]:
        """Return those metrics that any of the runs has logged."""
        return [name for name in self.metrics if any(len(style.series(h, name)[0]) for h in histories)]


def _read() -> dict[str, list[CurveSet]]:
    sections = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {section: [CurveSet(**one) for one in sets] for section, sets in sections.items()}


CURVES = _read()
"""Curves of each section of a report, in order."""
GOLD = "Proxy and gold"
"""Title of the curves that are shown only if the verifier's score is not the reward."""


def logged_curves(section: str, histories: Sequence[History]) -> list[CurveSet]:
    """Return the curves of a section of which any run has logged a metric."""
    rows = [row for history in histories for row in history]
    has_gold = any(row.get("rewards/exact_match", row.get("reward")) != row.get("reward") for row in rows)
    return [one for one in CURVES[section] if one.logged(*histories) and (has_gold or one.title != GOLD)]


class Curve(NamedTuple):
    """One metric of one run, and how it is drawn."""

    history: History
    metric: str
    label: str
    color: str
    dashes: Dashes = "-"


def draw(title: str, history: History) -> Figure:
    """Draw the curves of this title, such as Reward."""
    return draw_metrics(next(one for sets in CURVES.values() for one in sets if one.title == title), history)


def draw_metrics(curves: CurveSet, history: History) -> Figure:
    """Draw the logged metrics of one run."""
    named = zip(curves.metrics.items(), style.PALETTE, strict=False)
    found = [Curve(history, metric, label, color) for (metric, label), color in named]
    return _draw(curves, found, has_legend=len(found) > 1)  # else the name of the curve is that of the figure


def draw_runs(curves: CurveSet, metric: str, histories: Mapping[str, History]) -> Figure:
    """Draw one metric of several runs; a run's colour is its place in `histories`."""
    runs = enumerate(histories.items())
    found = [
        Curve(history, metric, run, style.run_color(n), style.run_dashes(n)) for n, (run, history) in runs
    ]
    return _draw(curves, found, has_legend=True)


def _draw(curves: CurveSet, found: Sequence[Curve], *, has_legend: bool) -> Figure:
    """Draw curves on the axes of their unit; a thick line is the mean of the last SMOOTHING iterations."""
    figure, axes = style.single_axes("Iteration", curves.y_label)
    is_log = curves.axis.startswith("log")
    for history, metric, label, color, dashes in found:
        iteration, value = style.series(history, metric)
        if len(value) == 0:
            continue
        value = curves.scale * value
        if is_log:
            if not (value > 0).any():
                label += ": negative, not drawn" if (value < 0).any() else ": 0 throughout"
            value = np.where(value > 0, value, np.nan)
        elif len(value) > 2 * style.SMOOTHING:
            axes.plot(iteration, value, color=color, lw=0.8, alpha=0.35)
            value = style.trailing_mean(value)
        axes.plot(iteration, value, color=color, lw=1.7, ls=dashes, marker=style.marker(value), label=label)
    if has_legend:
        style.legend(axes)
    if curves.axis == "share":
        style.share_axis(axes)
    elif curves.axis == "log percent":
        style.log_share_axis(axes)
    elif curves.axis == "log":
        axes.set_yscale("log")
    elif curves.axis != "free":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(style.small_percent if curves.axis == "percent" else "{x:,g}")
    style.integer_x_axis(axes)
    return figure


def accuracy_against_budget(before: Sequence[EvalRow], after: Sequence[EvalRow]) -> Figure:
    """Draw the accuracy at each cache budget; a dashed line is the same model with a dense cache."""
    is_single = not before or not after
    evaluations = {"before": before, "after": after}
    colors = {"before": style.MUTED, "after": style.BLUE}
    shown = {"" if is_single else name: rows for name, rows in evaluations.items() if rows}
    return accuracies(shown, [colors[name] for name, rows in evaluations.items() if rows])


def accuracies(evaluations: Mapping[str, Sequence[EvalRow]], colors: Sequence[str]) -> Figure:
    """Draw the accuracy of several evaluations at each cache budget, with 95% Wilson intervals.

    A dashed line, with a band for its interval, is a dense cache.

    Args:
        evaluations: rows by the name in the legend; an empty name is a single evaluation.
    """
    figure, axes = style.single_axes("Budget (keys per sequence, layer and KV head)", "Accuracy")
    budgets = sorted({row.budget for rows in evaluations.values() for row in rows if row.budget is not None})
    for (name, rows), color, marker in zip(evaluations.items(), colors, "soD^vPX" * 9, strict=False):
        known = [(row, row.accuracy) for row in rows if row.accuracy is not None]
        sparse = sorted((row.budget, accuracy) for row, accuracy in known if row.budget is not None)
        if sparse:
            x, y = zip(*sparse, strict=True)
            axes.plot(x, y, color=color, marker=marker, ms=4.5, lw=1.8, label=name or "under the budget")
        for row, accuracy in known:
            interval = accuracy_interval(row)
            if row.budget is not None and interval:
                sizes = [[accuracy - interval.low], [interval.high - accuracy]]
                axes.errorbar(row.budget, accuracy, sizes, fmt="none", color=color, elinewidth=1.2, capsize=3)
            if row.budget is None:
                label = f"dense, {name}" if name else "dense"
                axes.axhline(accuracy, color=color, lw=1.2, ls=style.DASHED, label=label, zorder=1.5)
                if interval:
                    axes.axhspan(interval.low, interval.high, color=color, alpha=0.1, lw=0, zorder=1)
    style.share_axis(axes)
    if budgets:
        axes.set_xscale("log", base=2)
        axes.set_xlim(budgets[0] / 1.15, budgets[-1] * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    style.legend(axes)
    return figure
