"""Pictures of one measured rollout: how long keys lived, and what attention eviction has cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lit_rlkv.reporting.plots.style import (
    BLUE,
    FULL_WIDTH,
    HEIGHT,
    INK,
    NORMAL,
    SMALL,
    VERMILLION,
    calm,
    legend,
    nothing,
    single,
)

Measured = Mapping[str, Any]
"""One line of diagnostics.jsonl that the diagnostic `cache` has written."""

MAX_WRITTEN = 12
"""Rows and columns of the largest table whose numbers are written into it."""


def attention_kept(measured: Measured | None) -> Figure:
    """The dense policy's attention on keys that the sampler still had, by layer and query head."""
    figure, left, right = _pair()
    if measured is None or "attention_kept" not in measured:
        right.set_axis_off()
        return nothing(figure, left, "no attention was measured")
    for axes, name, title in (
        (left, "attention_kept", "mean over queries"),
        (right, "attention_kept_p05", "5th percentile over queries"),
    ):
        _heat(axes, measured[name], title, "Query head", "{:.0%}", 0.0, 1.0)
    _scale(figure, right, "attention kept", PercentFormatter(1, decimals=0))
    return figure


def attention_on_dead(measured: Measured | None) -> Figure:
    """How much of its attention the dense policy gives to evicted keys at each position of the response."""
    figure, axes = single("Position in the response", "Attention on dead keys")
    if measured is None or "attention_on_dead" not in measured:
        return nothing(figure, axes, "no attention was measured")
    position = measured["position"]
    mass = np.array(measured["attention_on_dead"], dtype=float)
    low, high = mass.min(axis=0), mass.max(axis=0)
    axes.fill_between(position, low, high, color=BLUE, alpha=0.18, lw=0, label="all layers")
    axes.plot(position, mass.mean(axis=0), color=BLUE, lw=2, label="their mean")
    worst = int(np.nanmean(mass, axis=1).argmax())
    axes.plot(position, mass[worst], color=VERMILLION, lw=1.2, label=f"layer {worst}, the highest")
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes)
    return figure


def ages_at_eviction(measured: Measured | None) -> Figure:
    """How old keys were when they were evicted: of all heads, and the median of each."""
    figure, left, right = _pair()
    if measured is None or "lifetime_counts" not in measured:
        right.set_axis_off()
        return nothing(figure, left, "no key was evicted")
    edges, counts = np.array(measured["lifetime_edges"]), np.array(measured["lifetime_counts"])
    calm(left)
    borders = edges - 0.5  # a bar of one age stands on it
    left.bar(borders[:-1], counts / counts.sum(), np.diff(edges), align="edge", color=BLUE, lw=0)
    left.set_xlabel("Age at eviction (tokens)", fontsize=NORMAL, color=INK)
    left.set_ylabel("Share of evicted keys", fontsize=NORMAL, color=INK)
    left.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_xlim(borders[0], borders[-1])
    medians = np.array(measured["lifetime_median"], dtype=float)
    _heat(
        right, medians, "median", "KV head", "{:.0f}", 0.0, max(float(np.nanmax(medians, initial=1.0)), 1.0)
    )
    _scale(figure, right, "tokens", None)
    return figure


def _pair() -> tuple[Figure, Axes, Axes]:
    figure = Figure(figsize=(FULL_WIDTH, HEIGHT), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    return figure, left, right


def _heat(
    axes: Axes,
    table: Sequence[Sequence[float | None]] | np.ndarray,
    title: str,
    x_label: str,
    form: str,
    low: float,
    high: float,
) -> None:
    """A cell for each layer and head, its number in it where there are few."""
    values = np.array(table, dtype=float)
    axes.imshow(values, cmap="viridis", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=SMALL, color=INK, loc="left")
    axes.set_xlabel(x_label, fontsize=NORMAL, color=INK)
    axes.set_ylabel("Layer", fontsize=NORMAL, color=INK)
    axes.tick_params(labelsize=SMALL, length=0)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if max(values.shape) > MAX_WRITTEN:
        return
    for (layer, head), value in np.ndenumerate(values):
        if np.isfinite(value):
            color = "white" if value < low + 0.6 * (high - low) else INK
            text = form.format(value)
            axes.text(head, layer, text, ha="center", va="center", fontsize=SMALL, color=color)


def _scale(figure: Figure, axes: Axes, name: str, formatter: PercentFormatter | None) -> None:
    """The colours of the last table, beside it."""
    bar = figure.colorbar(axes.images[0], ax=axes, format=formatter)
    bar.set_label(name, fontsize=SMALL, color=INK)
    bar.ax.tick_params(labelsize=SMALL, length=0)
    bar.outline.set_visible(False)
