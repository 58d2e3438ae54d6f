"""Shared parts of all figures: sizes, colours, axes, legends, curves of logged metrics, pixels and SVG."""

import io
from collections.abc import Sequence
from textwrap import wrap

import matplotlib
import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, NullFormatter

from lit_rlkv.reporting.run_metrics import History

HALF_WIDTH, FULL_WIDTH, HEIGHT = 5.2, 10.4, 3.2
"""Inches; a report shows two figures of HALF_WIDTH side by side, or one of FULL_WIDTH."""

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e3e6eb"
BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"  # the palette of Okabe and Ito
ORANGE, SKY = "#e69f00", "#56b4e9"
SAND = "#f0c890"
PAPER = "#ffffff"
SCHEME = {
    "ink": (INK, "#e4e7ec"),
    "muted": (MUTED, "#9aa2b1"),
    "grid": (GRID, "#313843"),
    "paper": (PAPER, "#14171c"),
    "blue": (BLUE, "#58aef0"),
    "vermillion": (VERMILLION, "#ff8f4d"),
    "green": (GREEN, "#3ccf9e"),
    "purple": (PURPLE, "#e6a2cc"),
    "orange": (ORANGE, "#f2b632"),
    "sky": (SKY, "#9ad7fb"),
    "sand": (SAND, "#8d6c3c"),
}
"""Colour of each name on a light and on a dark page, whose stylesheet exchanges them; figures are light."""
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, MUTED)
"""Colours of curves, in order."""
SMALL, NORMAL = 8, 9
"""Font sizes in points."""
MAX_LABEL, LAYOUT_GAIN = 60, 1.12
"""Characters of a line of a legend, and how much wider the layout makes axes."""
Dashes = str | tuple[int, tuple[int, int]]
DASHED: Dashes = (0, (5, 3))
PERCENT = "{x:.0%}"


def run_color(place: int) -> str:
    """Return the colour of a run by its place among the compared runs."""
    return PALETTE[place % len(PALETTE)]


def run_dashes(place: int) -> Dashes:
    """Return the line style of a compared run: dashed for every other one, so that equal curves all show."""
    return "-" if place % 2 == 0 else DASHED


def single_axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, half as wide as a report."""
    figure = Figure(figsize=(HALF_WIDTH, HEIGHT), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes)
    label_axes(axes, x_label, y_label)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """Draw grid, ticks and spines behind the data, in pale colours."""
    axes.set_axisbelow(True)
    axes.grid(visible=True, color=GRID, lw=0.8)
    axes.tick_params(which="both", labelsize=SMALL, labelcolor=MUTED, color=GRID)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(GRID)


def label_axes(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label, fontsize=NORMAL, color=INK)
    axes.set_ylabel(y_label, fontsize=NORMAL, color=INK)


def legend(axes: Axes, n_columns: int = 3) -> None:
    """Add a legend above the axes, where it hides no data, in at most as many columns as have room."""
    handles, labels = axes.get_legend_handles_labels()
    labels = ["\n".join(wrap(label, MAX_LABEL)) for label in labels]
    for n in range(len(labels) if len(labels) <= n_columns else 2, 0, -1):
        found = axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=n,
            frameon=False,
            fontsize=SMALL,
            borderaxespad=0.2,
        )
        if found.get_window_extent().width <= LAYOUT_GAIN * axes.bbox.width:
            break
    color_texts(found.get_texts())


def finish(figure: Figure, axes: Axes, n_columns: int = 3) -> Figure:
    """Add a legend and integer ticks on the x axis, and return the figure."""
    integer_x_axis(axes)
    legend(axes, n_columns)
    return figure


def integer_x_axis(axes: Axes) -> None:
    """Put the ticks of the x axis at integers, also around a single point."""
    low, high = axes.get_xlim()
    if high - low < 1:
        axes.set_xlim(low - 1, high + 1)
    integer_ticks(axes.xaxis)


def integer_ticks(*found: Axis) -> None:
    """Put the ticks of these x or y axes at integers."""
    for axis in found:
        axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def color_texts(texts: Sequence[Text]) -> None:
    """Write texts in the colour of the page."""
    for text in texts:
        text.set_color(INK)


def share_axis(axes: Axes) -> None:
    """Let the y axis show shares from 0 to 100 %."""
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PERCENT)


def log_share_axis(axes: Axes) -> None:
    """Let the y axis show shares on a log scale, with the ticks of at least 10 % and 100 %."""
    axes.set_yscale("log")
    axes.set_ylim(min(0.09, axes.get_ylim()[0]), 1.3)
    axes.yaxis.set_major_formatter(small_percent)
    axes.yaxis.set_minor_formatter(NullFormatter())


def small_percent(value: float, position: float | int | None = None) -> str:
    """Format a share as a percentage with significant digits only, such as 0.1%."""
    return f"{100 * value:g}%"


SMOOTHING = 10
"""Window of moving averages in iterations."""


def series(history: History, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the iterations at which a metric was logged and finite, and its values there."""
    points = [(row["iteration"], row[metric]) for row in history if np.isfinite(row.get(metric, np.nan))]
    iteration, value = np.array(points, dtype=float).reshape(-1, 2).T
    return iteration, value


def marker(values: np.ndarray) -> str:
    """Return a marker for curves of so few points that a line alone may not show."""
    return "." if len(values) < 2 * SMOOTHING else ""


def trailing_mean(values: np.ndarray) -> np.ndarray:
    """Return the moving average over the last SMOOTHING values, or fewer at the start."""
    return np.array([values[max(0, end - SMOOTHING) : end].mean() for end in range(1, len(values) + 1)])


PIXELS_PER_INCH = 150
MAX_VECTOR_SHAPES = 200
"""Most shapes of a kind in an SVG; more are pixels, or the page would have megabytes."""


def pixels(figure: Figure) -> UInt8[np.ndarray, "height width 3"]:
    """Return the figure as RGB pixels on a white background."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=PIXELS_PER_INCH, facecolor="white")
    buffer.seek(0)
    return np.round(imread(buffer)[..., :3] * 255).astype(np.uint8)


def svg(figure: Figure, key: str) -> str:
    """Return the figure as an `<svg>` element for a page.

    Args:
        key: unique on the page, so that no two figures share a clip path.
    """
    buffer = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # Texts stay texts: smaller, searchable, and in the font of the page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        figure.savefig(buffer, format="svg", transparent=True, dpi=PIXELS_PER_INCH, metadata=metadata)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
