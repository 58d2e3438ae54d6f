"""The figure of a sweep: the metric against each parameter that varies."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lit_rlkv.reporting.plots import style
from lit_rlkv.sweeping.parameters import Parameter
from lit_rlkv.sweeping.results import Ended, without_seed
from lit_rlkv.sweeping.sweep_file import Sweep

PICTURE = "sweep.png"
COLORS = (*style.PALETTE, style.INK)
"""Colours of Okabe and Ito, and two greys; a parameter with more values gets one colour."""
MARKERS = "osD^vPXd"
DODGE = 0.08
"""Distance of groups at one label, in units of the distance of labels."""
WIDE = 16
"""Ratio of the largest number to the smallest from which their axis is logarithmic."""
PANEL, CHARACTER, GAP = 4.4, 0.066, 0.1
"""Inches: width of a panel's axes, of a character at SMALL size, and between two labels."""
TITLE_HEIGHT = 0.6
SLANTED = 12
"""Most labels that have room side by side when they are slanted."""
LONGEST_NAME, LONGEST_LABEL = 56, 24
"""Characters of an axis' or the sweep's name, and of a value."""
KEPT = 4
"""Characters that short forms keep of a beginning and an end that all labels share."""


@dataclass(frozen=True)
class Scale:
    """Positions of a parameter's listed values on its axis."""

    places: dict[str, float]
    is_numeric: bool
    is_log: bool = False

    @classmethod
    def of(cls, labels: Sequence[str]) -> "Scale":
        """Place numbers at their values if their labels have room there, and other values side by side."""
        try:
            places = {label: float(label) for label in labels}
        except ValueError:
            return cls.side_by_side(labels)
        if len({*places.values()}) < len(places) or not all(map(math.isfinite, places.values())):
            return cls.side_by_side(labels)
        low, high = min(places.values()), max(places.values())
        is_log = low > 0 and high / low >= WIDE
        ticks = [(math.log(place) if is_log else place, len(label)) for label, place in places.items()]
        ticks.sort()
        span = ticks[-1][0] - ticks[0][0]
        has_room = all(
            (after - before) / span * PANEL >= distance(n_before, n_after)
            for (before, n_before), (after, n_after) in pairwise(ticks)
        )
        return cls(places, True, is_log) if has_room else cls.side_by_side(sorted(labels, key=float))

    @classmethod
    def side_by_side(cls, labels: Sequence[str]) -> "Scale":
        """Place the values at equal distances, in this order."""
        return cls({label: float(index) for index, label in enumerate(labels)}, is_numeric=False)

    def apply(self, axes: Axes) -> None:
        """Put ticks at the values only, with labels that do not touch."""
        labels = list(short_labels(list(self.places)).values())
        if self.is_log:
            axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        widest = max((distance(*map(len, pair)) for pair in pairwise(labels)), default=0.0)
        is_long = not self.is_numeric and widest * len(labels) > PANEL
        axes.set_xticks(list(self.places.values()), labels)
        if is_long:
            angle = 30 if len(labels) <= SLANTED else 90
            axes.tick_params(axis="x", labelrotation=angle)
            for text in axes.get_xticklabels():
                text.set(ha="right", rotation_mode="anchor", va="top" if angle == 30 else "center")
        if not self.is_numeric:
            axes.set_xlim(-0.5, len(labels) - 0.5)


@dataclass(frozen=True)
class Point:
    """A run in the figure."""

    values: dict[str, str]
    """Values of all parameters, as texts."""
    metric: float
    is_stopped: bool


def draw_sweep(sweep: Sweep, ended: Ended) -> Figure | None:
    """Draw a panel for each parameter that varies, except the seed; return None if no run has the metric.

    Only runs with a result are drawn, and only their values have a place. Listed values show the runs, and
    their mean ± standard deviation. With two parameters, each panel has a line for each value of the other.
    Runs stopped early are hollow.
    """
    points = _points(sweep, ended)
    if not points:
        return None
    parameters = _varied(without_seed(sweep.parameters) or list(sweep.parameters), points)
    n_columns = min(len(parameters), 2)
    n_lines = math.ceil(len(parameters) / n_columns)
    width = style.HALF_WIDTH if n_columns == 1 else style.FULL_WIDTH
    height = TITLE_HEIGHT + (style.HEIGHT + 0.6) * n_lines
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    figure.suptitle(_title(sweep, ended, points), x=0.01, ha="left", fontsize=style.NORMAL, color=style.INK)
    panels = list(figure.subplots(n_lines, n_columns, squeeze=False, sharey=True).flat)
    for number, (parameter, axes) in enumerate(zip(parameters, panels, strict=False)):
        style.style_axes(axes)
        _draw_panel(axes, parameter, _line_parameter(parameter, parameters, points), points)
        axes.set_xlabel(shortened(parameter.name, LONGEST_NAME), fontsize=style.NORMAL, color=style.INK)
        if number % n_columns == 0:
            name = shortened(sweep.metric.name, LONGEST_LABEL * 2)
            axes.set_ylabel(name, fontsize=style.NORMAL, color=style.INK)
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


def distance(*n_characters: int) -> float:
    """Return the inches that the centres of two labels must be apart."""
    return sum(n_characters) / 2 * CHARACTER + GAP


def shortened(text: str, n: int) -> str:
    """Return the text, or its beginning and its longer end in `n` characters."""
    return text if len(text) <= n else f"{text[: n // 3]}…{text[-(n - n // 3 - 1) :]}"


def short_labels(labels: Sequence[str]) -> dict[str, str]:
    """Return a short form of each label; no two are the same."""
    if max(map(len, labels)) <= LONGEST_LABEL:
        return {label: label for label in labels}
    n_before = max(0, _n_shared(labels) - KEPT)
    n_after = max(0, _n_shared([label[::-1] for label in labels]) - KEPT)
    short = {}
    for label in labels:
        middle = label[n_before : max(n_before + 1, len(label) - n_after)]
        text = f"{'…' if n_before else ''}{middle}{'…' if n_after else ''}"
        short[label] = shortened(text, LONGEST_LABEL)
    return short if len(set(short.values())) == len(labels) else {label: label for label in labels}


def _n_shared(texts: Sequence[str]) -> int:
    """Return the number of characters with which all texts begin."""
    return len(list(takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))))


def _title(sweep: Sweep, ended: Ended, points: Sequence[Point]) -> str:
    """Return what is drawn, and how many runs are not."""
    n_stopped = sum(point.is_stopped for point in points)
    n_failed = sum(outcome.state == "failed" for _, outcome in ended)
    counts = {
        "finished": len(points) - n_stopped,
        "stopped early (hollow)": n_stopped,
        "failed (not drawn)": n_failed,
        "without the metric (not drawn)": len(ended) - len(points) - n_failed,
    }
    said = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
    has_means = any(each.listed() for each in without_seed(sweep.parameters))
    lines = [shortened(sweep.name, LONGEST_NAME), f"runs: {said}"]
    return "\n".join([*lines, *(["large markers: mean ± standard deviation"] if has_means else [])])


def _varied(parameters: Sequence[Parameter], points: Sequence[Point]) -> list[Parameter]:
    """Return the parameters with several values among the points; the first one if there is none."""
    n_values = Counter(name for name, _ in {pair for point in points for pair in point.values.items()})
    return [each for each in parameters if n_values[each.name] > 1] or [parameters[0]]


def _listed(parameter: Parameter, points: Sequence[Point]) -> list[str]:
    """Return the listed values that points have, in the order of the list; none for ranges of numbers."""
    drawn = {point.values[parameter.name] for point in points}
    return [label for label in parameter.listed() if label in drawn]


def _points(sweep: Sweep, ended: Ended) -> list[Point]:
    found = []
    for run, outcome in ended:
        metric = outcome.metrics.get(sweep.metric.name, math.nan)
        if outcome.state != "failed" and math.isfinite(metric):
            values = {name: str(value) for name, value in run.values.items()}
            found.append(Point(values, metric, outcome.state == "stopped"))
    return found


def _line_parameter(
    parameter: Parameter, parameters: Sequence[Parameter], points: Sequence[Point]
) -> Parameter | None:
    """Return the other of two listed parameters, whose values get a line each."""
    others = [other for other in parameters if other is not parameter]
    if len(others) != 1 or not parameter.listed():
        return None
    return others[0] if 0 < len(_listed(others[0], points)) <= len(COLORS) else None


def _draw_panel(axes: Axes, parameter: Parameter, other: Parameter | None, points: Sequence[Point]) -> None:
    labels = _listed(parameter, points)
    if not labels:
        _draw_cloud(axes, parameter, points)
        return
    scale = Scale.of(labels)
    groups = [None] if other is None else _listed(other, points)
    names = {} if other is None else short_labels(_listed(other, points))
    for index, group in enumerate(groups):
        mine = [p for p in points if other is None or p.values[other.name] == group]
        shift = 0.0 if scale.is_numeric else DODGE * (index - (len(groups) - 1) / 2)
        _draw_group(axes, parameter.name, scale, mine, index, shift, None if group is None else names[group])
    scale.apply(axes)
    if other is not None:
        _name_lines(axes, other.name)


def _draw_group(
    axes: Axes, name: str, scale: Scale, points: Sequence[Point], index: int, shift: float, label: str | None
) -> None:
    """Draw runs as dots, and their mean ± standard deviation at each value; a line joins numbers."""
    color, marker = COLORS[index], MARKERS[index]
    _dots(axes, [(scale.places[p.values[name]] + shift, p) for p in points], color)
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
    """Put the legend above the axes, where it hides no data, as wide as they are."""
    longest = max(map(len, axes.get_legend_handles_labels()[1]))
    found = axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=max(1, min(4, int(PANEL / ((longest + 6) * CHARACTER)))),
        frameon=False,
        fontsize=style.SMALL,
        title=shortened(title, LONGEST_NAME),
        title_fontsize=style.SMALL,
        alignment="left",
    )
    style.color_texts([*found.get_texts(), found.get_title()])


def _draw_cloud(axes: Axes, parameter: Parameter, points: Sequence[Point]) -> None:
    _dots(axes, [(float(p.values[parameter.name]), p) for p in points], style.BLUE, size=22)
    if parameter.is_log:
        axes.set_xscale("log")
    axes.tick_params(which="minor", color=style.GRID)


def _dots(axes: Axes, placed: Sequence[tuple[float, Point]], color: str, size: int = 10) -> None:
    """Draw runs, hollow if stopped."""
    for is_stopped in (False, True):
        mine = [(place, p.metric) for place, p in placed if p.is_stopped is is_stopped]
        if mine:
            x, y = zip(*mine, strict=True)
            filled = "none" if is_stopped else color
            axes.scatter(x, y, s=size, facecolors=filled, edgecolors=color, alpha=0.5, lw=0.8)
