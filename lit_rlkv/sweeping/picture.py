"""The figure of a sweep: the metric against each parameter that varies."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lit_rlkv.reporting.plots import style
from lit_rlkv.sweeping.parameters import Parameter
from lit_rlkv.sweeping.results import Ended, without_seed
from lit_rlkv.sweeping.sweep_file import Sweep

PICTURE = "sweep.png"
COLORS = (
    style.BLUE,
    style.VERMILLION,
    style.GREEN,
    style.PURPLE,
    "#e69f00",
    "#56b4e9",
    style.MUTED,
    style.INK,
)
"""Colours of Okabe and Ito, and two greys; a parameter with more values gets one colour."""
MARKERS = "osD^vPXd"
DODGE = 0.08
"""Distance of groups at one label, in units of the distance of labels."""
WIDE = 16
"""Ratio of the largest number to the smallest from which their axis is logarithmic."""


@dataclass(frozen=True)
class Scale:
    """Positions of a parameter's listed values on its axis."""

    places: dict[str, float]
    is_numeric: bool

    @classmethod
    def of(cls, labels: Sequence[str]) -> "Scale":
        """Place numbers at their values, and other values side by side."""
        try:
            return cls({label: float(label) for label in labels}, is_numeric=True)
        except ValueError:
            return cls({label: float(index) for index, label in enumerate(labels)}, is_numeric=False)

    def apply(self, axes: Axes) -> None:
        """Put ticks at the values only; numbers that are far apart get a logarithmic axis."""
        places, labels = list(self.places.values()), list(self.places)
        if self.is_numeric and min(places) > 0 and max(places) / min(places) >= WIDE:
            axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        is_long = sum(map(len, labels)) > 40
        axes.set_xticks(places, labels, rotation=30 if is_long else 0, ha="right" if is_long else "center")
        if not self.is_numeric:
            axes.set_xlim(-0.5, len(places) - 0.5)


@dataclass(frozen=True)
class Point:
    """A run in the figure."""

    values: dict[str, str]
    """Values of all parameters, as texts."""
    metric: float
    is_stopped: bool


def draw_sweep(sweep: Sweep, ended: Ended) -> Figure | None:
    """Draw a panel for each parameter except the seed; return None if no run has the metric.

    Listed values show the runs, and their mean ± standard deviation. With two parameters, each panel has a
    line for each value of the other. Runs stopped early are hollow.
    """
    points = _points(sweep, ended)
    if not points:
        return None
    parameters = without_seed(sweep.parameters) or list(sweep.parameters)
    n_columns = min(len(parameters), 2)
    n_lines = math.ceil(len(parameters) / n_columns)
    width = style.HALF_WIDTH if n_columns == 1 else style.FULL_WIDTH
    figure = Figure(figsize=(width, (style.HEIGHT + 0.6) * n_lines), dpi=150, layout="constrained")
    panels = list(figure.subplots(n_lines, n_columns, squeeze=False, sharey=True).flat)
    for number, (parameter, axes) in enumerate(zip(parameters, panels, strict=False)):
        style.style_axes(axes)
        _draw_panel(axes, parameter, _line_parameter(parameter, parameters), points)
        axes.set_xlabel(parameter.name, fontsize=style.NORMAL, color=style.INK)
        if number % n_columns == 0:
            axes.set_ylabel(sweep.metric.name, fontsize=style.NORMAL, color=style.INK)
    for axes in panels[len(parameters) :]:
        axes.set_axis_off()
    return figure


def save_picture(folder: Path, sweep: Sweep, ended: Ended) -> Path | None:
    """Save the figure in the folder of the sweep; return None if there is nothing to draw."""
    figure = draw_sweep(sweep, ended)
    if figure is None:
        return None
    figure.savefig(folder / PICTURE)
    return folder / PICTURE


def _points(sweep: Sweep, ended: Ended) -> list[Point]:
    found = []
    for run, outcome in ended:
        metric = outcome.metrics.get(sweep.metric.name, math.nan)
        if outcome.state != "failed" and math.isfinite(metric):
            values = {name: str(value) for name, value in run.values.items()}
            found.append(Point(values, metric, outcome.state == "stopped"))
    return found


def _line_parameter(parameter: Parameter, parameters: Sequence[Parameter]) -> Parameter | None:
    """Return the other of two listed parameters, whose values get a line each."""
    others = [other for other in parameters if other is not parameter]
    is_possible = len(others) == 1 and parameter.listed() and 0 < len(others[0].listed()) <= len(COLORS)
    return others[0] if is_possible else None


def _draw_panel(axes: Axes, parameter: Parameter, other: Parameter | None, points: Sequence[Point]) -> None:
    labels = [label for label in parameter.listed() if any(p.values[parameter.name] == label for p in points)]
    if not labels:
        _draw_cloud(axes, parameter, points)
        return
    scale = Scale.of(labels)
    groups = [None] if other is None else other.listed()
    for index, group in enumerate(groups):
        mine = [p for p in points if other is None or p.values[other.name] == group]
        shift = 0.0 if scale.is_numeric else DODGE * (index - (len(groups) - 1) / 2)
        _draw_group(axes, parameter.name, scale, mine, index, shift, group)
    scale.apply(axes)
    if other is not None:
        _name_lines(axes, other.name)


def _draw_group(
    axes: Axes, name: str, scale: Scale, points: Sequence[Point], index: int, shift: float, label: str | None
) -> None:
    """Draw runs as dots, and their mean ± standard deviation at each value; a line joins numbers."""
    color, marker = COLORS[index], MARKERS[index]
    _dots(axes, [(scale.places[p.values[name]] + shift, p) for p in points], color, mark="_")
    by_place: dict[float, list[float]] = {place + shift: [] for place in scale.places.values()}
    for p in points:
        if not p.is_stopped:
            by_place[scale.places[p.values[name]] + shift].append(p.metric)
    known = sorted((place, metrics) for place, metrics in by_place.items() if metrics)
    axes.errorbar(
        [place for place, _ in known],
        [statistics.mean(metrics) for _, metrics in known],
        [statistics.stdev(metrics) if len(metrics) > 1 else 0.0 for _, metrics in known],
        color=color,
        marker=marker,
        ms=5,
        lw=1.6 if scale.is_numeric else 0,
        elinewidth=1.2,
        capsize=2.5,
        label=label,
        zorder=3,
    )


def _name_lines(axes: Axes, title: str) -> None:
    """Put the legend above the axes, where it hides no data."""
    found = axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=4,
        frameon=False,
        fontsize=style.SMALL,
        title=title,
        title_fontsize=style.SMALL,
        alignment="left",
    )
    style.color_texts([*found.get_texts(), found.get_title()])


def _draw_cloud(axes: Axes, parameter: Parameter, points: Sequence[Point]) -> None:
    _dots(axes, [(float(p.values[parameter.name]), p) for p in points], style.BLUE, size=22)
    if parameter.is_log:
        axes.set_xscale("log")
    axes.tick_params(which="minor", color=style.GRID)
    if any(p.is_stopped for p in points):
        style.legend(axes)


def _dots(
    axes: Axes, placed: Sequence[tuple[float, Point]], color: str, size: int = 10, mark: str = ""
) -> None:
    """Draw runs, hollow if stopped; matplotlib leaves labels that begin with "_" out of the legend."""
    for is_stopped in (False, True):
        mine = [(place, p.metric) for place, p in placed if p.is_stopped is is_stopped]
        if mine:
            x, y = zip(*mine, strict=True)
            filled, label = ("none", "stopped early") if is_stopped else (color, "finished")
            axes.scatter(
                x, y, s=size, facecolors=filled, edgecolors=color, alpha=0.5, lw=0.8, label=f"{mark}{label}"
            )
