"""Figures of how eviction moves the policy: by position in the response, by layer."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_rlkv.reporting.plots import style

Measured = Mapping[str, Any]
"""A line of diagnostics.jsonl."""

ROUNDING = 1e-6
"""Mismatch in nats below which it is rounding error and not drawn."""

RARE = 0.05
"""Positions with a smaller share of the responses than this are shaded."""

X_LABEL = "Position in the response"


def mismatch_by_position(measured: Measured) -> Figure:
    """Draw the KL and the tail of |log ρ| at each position, on a log axis."""
    figure, axes = style.single_axes(X_LABEL, "Mismatch (nats)")
    axes.set_yscale("log")
    for name, color, label in (
        ("abs_log_ratio_p99", style.VERMILLION, "|log ρ|, 99th percentile"),
        ("abs_log_ratio_p95", style.GREEN, "95th"),
        ("k3", style.BLUE, "KL, mean"),
    ):
        value = _column(measured, name)
        value[value < ROUNDING] = np.nan
        _plot(axes, measured, value, color, label)
    axes.set_xlim(left=0)
    return _finish(figure, axes, measured)


def overlap_by_position(measured: Measured) -> Figure:
    """Draw the overlap of the sparse and the dense distribution at each position."""
    figure, axes = style.single_axes(X_LABEL, "Overlap Σ min(μ, π)")
    _plot(axes, measured, _column(measured, "overlap_mean"), style.BLUE, "mean")
    _plot(axes, measured, _column(measured, "overlap_p05"), style.VERMILLION, "5th percentile")
    style.share_axis(axes)
    return _finish(figure, axes, measured)


def weights_by_position(measured: Measured) -> Figure:
    """Draw the cost of unbiased reweighting of the response so far: effective sample size, |log Π ρ|."""
    figure, axes = style.single_axes(X_LABEL, "Effective sample size")
    position, share = _column(measured, "position"), _column(measured, "prefix_ess")
    axes.plot(position, share, color=style.BLUE, lw=2, label="sample size, left axis")
    style.log_share_axis(axes)
    right = axes.twinx()
    right.set_ylabel("|log Π ρ| (nats)", color=style.VERMILLION, size=style.NORMAL)
    right.tick_params(colors=style.VERMILLION, labelsize=style.SMALL, length=0)
    right.spines[:].set_visible(False)
    for name, dashes, label in (
        ("prefix_abs_log_ratio", "-", "|log Π ρ|, mean"),
        ("prefix_abs_log_ratio_p95", style.DASHED, "95th percentile"),
    ):
        right.plot(position, _column(measured, name), color=style.VERMILLION, lw=1.4, ls=dashes)
        axes.plot([], [], color=style.VERMILLION, lw=1.4, ls=dashes, label=label)  # for the legend
    right.set_ylim(bottom=0)
    return _finish(figure, axes, measured)


def _column(measured: Measured, name: str) -> np.ndarray:
    """Return an array of the measurement, with NaN for None."""
    return np.array(measured[name], dtype=float)


def _plot(axes: Axes, measured: Measured, value: np.ndarray, color: str, label: str) -> None:
    position = _column(measured, "position")
    axes.plot(position, value, color=color, lw=1.8, marker=".", ms=4, label=label)


def _finish(figure: Figure, axes: Axes, measured: Measured) -> Figure:
    """Shade the positions that few responses reach, add a legend, and return the figure."""
    position, n_response_tokens = _column(measured, "position"), _column(measured, "n_response_tokens")
    is_rare = n_response_tokens < RARE * n_response_tokens[0]
    if is_rare.any():
        half = (position[1] - position[0]) / 2
        low, high = position[is_rare.argmax()] - half, position[-1] + half
        label = f"fewer than {RARE:.0%} get here"
        axes.axvspan(low, high, color=style.GRID, alpha=0.6, lw=0, label=label, zorder=0)
    return style.finish(figure, axes)


def layer_mismatch(first: Measured, last: Measured) -> Figure:
    """Draw the KL from the dense policy if only one layer evicts keys, for each layer.

    Args:
        first: the first line of diagnostics.jsonl from the diagnostic `layers`, for comparison.
        last: the line to draw.
    """
    figure, axes = style.single_axes("Layer that evicts", "KL from the dense policy (nats)")
    layer = np.arange(len(last["layer_kl"]))
    axes.bar(layer, last["layer_kl"], color=style.BLUE, width=0.6, label=f"iteration {last['iteration']}")
    if first["iteration"] != last["iteration"]:
        label = f"iteration {first['iteration']}"
        axes.plot(layer, first["layer_kl"], "o", mfc="white", mec=style.INK, ms=5, label=label)
    axes.axhline(
        last["all_layers_kl"], color=style.VERMILLION, lw=1.4, ls=style.DASHED, label="all layers evict"
    )
    axes.set_ylim(bottom=0)
    return style.finish(figure, axes)
