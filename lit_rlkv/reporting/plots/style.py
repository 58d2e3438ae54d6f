"""Shared parts of all figures: sizes, colours, axes, legends, curves of logged metrics, pixels."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import UInt8
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

HALF_WIDTH, FULL_WIDTH, HEIGHT = 5.2, 10.4, 3.2
"""Inches; a report shows two figures of HALF_WIDTH side by side, or one of FULL_WIDTH."""

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e3e6eb"
BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"  # the palette of Okabe and Ito
SAND = "#f0c890"
SMALL, NORMAL = 8, 9
"""Font sizes in points."""


def single_axes(x_label: str, y_label: str, height: float | int = HEIGHT) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, half as wide as a report."""
    figure = Figure(figsize=(HALF_WIDTH, height), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes)
    axes.set_xlabel(x_label, fontsize=NORMAL, color=INK)
    axes.set_ylabel(y_label, fontsize=NORMAL, color=INK)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """Draw grid, ticks and spines behind the data, in pale colours."""
    axes.set_axisbelow(True)
    axes.grid(visible=True, color=GRID, lw=0.8)
    axes.tick_params(labelsize=SMALL, labelcolor=MUTED, color=GRID)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(GRID)


def legend(axes: Axes, n_columns: int = 3) -> None:
    """Add a legend above the axes, where it hides no data."""
    n_entries = len(axes.get_legend_handles_labels()[0])
    found = axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=n_entries if n_entries <= n_columns else 2,
        frameon=False,
        fontsize=SMALL,
        borderaxespad=0.2,
    )
    color_texts(found.get_texts())


def color_texts(texts: Sequence[Text]) -> None:
    """Write texts in the colour of the page."""
    for text in texts:
        text.set_color(INK)


def labelled_line(axes: Axes, height: float | int, name: str, side: str) -> None:
    """Draw a horizontal line with a label at its right end; `side` is the vertical alignment of the text."""
    axes.axhline(height, color=VERMILLION, lw=0.9, label=f"_{name}", zorder=1.5)
    axes.annotate(
        name,
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        fontsize=SMALL,
        color=VERMILLION,
        va=side,
        annotation_clip=False,
    )


def right_axis(axes: Axes, label: str) -> Axes:
    """Return a second y axis on the right, in the colour of its curves (VERMILLION)."""
    right = axes.twinx()
    right.set_ylabel(label, color=VERMILLION, size=NORMAL)
    right.tick_params(colors=VERMILLION, labelsize=SMALL, length=0)
    right.spines[:].set_visible(False)
    return right


def empty_figure(figure: Figure, axes: Axes, reason: str) -> Figure:
    """Return the figure with a reason in place of its axes."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, reason, ha="center", va="center", fontsize=NORMAL, color=MUTED)
    return figure


History = Sequence[Mapping[str, float | int]]
"""Logged metrics, one mapping per iteration with "iteration"; other metrics may be missing."""

SMOOTHING = 10
"""Window of moving averages in iterations."""


def series(history: History, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the iterations at which a metric was logged and finite, and its values there."""
    points = [(row["iteration"], row[metric]) for row in history if np.isfinite(row.get(metric, np.nan))]
    iteration, value = np.array(points, dtype=float).reshape(-1, 2).T
    return iteration, value


def trailing_mean(values: np.ndarray) -> np.ndarray:
    """Return the moving average over the last SMOOTHING values, or fewer at the start."""
    return np.array([values[max(0, end - SMOOTHING) : end].mean() for end in range(1, len(values) + 1)])


PIXELS_PER_INCH = 150


def pixels(figure: Figure) -> UInt8[np.ndarray, "height width 3"]:
    """Return the figure as RGB pixels on a white background."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=PIXELS_PER_INCH, facecolor="white")
    buffer.seek(0)
    return np.round(imread(buffer)[..., :3] * 255).astype(np.uint8)
