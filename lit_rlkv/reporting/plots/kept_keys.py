"""Figures of the keys that a cache kept and evicted: counts, attention, ages, lifetimes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from lit_rlkv.diagnostics.evictions import cached_keys, response_queries
from lit_rlkv.reporting.plots import style
from lit_rlkv.types import NEVER, Rollout


def cache_fill(rollout: Rollout, budget: int | None = None, interval: int | None = None) -> Figure:
    """Draw the cached keys at each query over all sequences, layers and heads, beside a dense cache."""
    figure, axes = style.single_axes("Tokens since the response began", "Cached keys per layer and KV head")
    rollout = rollout.to("cpu")
    is_query = rollout.attention_mask & response_queries(rollout.attention_mask)
    is_shown = is_query.any(dim=0)
    response_start = int(rollout.response_mask.any(dim=0).int().argmax())
    x = (torch.arange(len(is_shown)) - response_start)[is_shown].numpy()

    def at_queries(counts: Tensor) -> np.ndarray:
        """Return counts as [sequence x layer x head, column], NaN where a sequence had no query."""
        values = counts.double().masked_fill(~is_query[:, None, None], torch.nan)
        return values.flatten(0, 2)[:, is_shown].numpy()

    n_layers = rollout.evicted_at.shape[1]
    cached = at_queries(torch.stack([cached_keys(rollout, layer) for layer in range(n_layers)], dim=1))
    dense = at_queries(rollout.attention_mask.cumsum(dim=1)[:, None, None])
    low, high = np.nanmin(cached, axis=0), np.nanmax(cached, axis=0)
    axes.plot(x, np.nanmean(dense, axis=0), color=style.MUTED, lw=1.4, ls=style.DASHED, label="dense, mean")
    axes.fill_between(x, low, high, color=style.BLUE, alpha=0.18, lw=0, label="cached, least to most")
    axes.plot(x, np.nanmean(cached, axis=0), color=style.BLUE, lw=2, label="cached, mean")
    axes.axvline(0, color=style.INK, lw=0.8, ls=":")
    if budget is not None:
        _labelled_line(axes, budget, f"budget {budget}", "top")
    if budget is not None and interval is not None:
        _labelled_line(axes, budget + interval, f"slots {budget + interval}", "bottom")
    axes.set_ylim(bottom=0)
    style.integer_ticks(axes.yaxis)
    return style.finish(figure, axes)


def _labelled_line(axes: Axes, height: int, name: str, side: str) -> None:
    """Draw a horizontal line with a label at its right end; `side` is the vertical alignment of the text."""
    axes.axhline(height, color=style.VERMILLION, lw=0.9, label=f"_{name}", zorder=1.5)
    axes.annotate(
        name,
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        fontsize=style.SMALL,
        color=style.VERMILLION,
        va=side,
        annotation_clip=False,
    )


Measured = Mapping[str, Any]
"""A line of diagnostics.jsonl from the diagnostic `cache`."""

MAX_ANNOTATED = 12
"""Most rows or columns of a table whose cells show numbers."""


def attention_kept(measured: Measured) -> Figure:
    """Draw the dense policy's attention on keys in the sampler's cache, by layer and query head."""
    figure, left, right = style.two_axes()
    for axes, name, title in (
        (left, "attention_kept", "mean over queries"),
        (right, "attention_kept_p05", "5th percentile over queries"),
    ):
        _heat(axes, measured[name], title, "Query head", style.PERCENT, 1.0)
    _color_bar(figure, right, "attention kept", style.PERCENT)
    return figure


def attention_on_evicted(measured: Measured) -> Figure:
    """Draw the dense policy's attention on evicted keys at each position of the response."""
    figure, axes = style.single_axes("Position in the response", "Attention on evicted keys")
    position = measured["position"]
    mass = np.array(measured["attention_on_dead"], dtype=float)
    low, high = mass.min(axis=0), mass.max(axis=0)
    axes.fill_between(position, low, high, color=style.BLUE, alpha=0.18, lw=0, label="all layers")
    axes.plot(position, mass.mean(axis=0), color=style.BLUE, lw=2, label="their mean")
    worst = int(np.nanmean(mass, axis=1).argmax())
    axes.plot(position, mass[worst], color=style.VERMILLION, lw=1.2, label=f"layer {worst}, the highest")
    style.share_axis(axes)
    return style.finish(figure, axes)


def ages_at_eviction(measured: Measured) -> Figure:
    """Draw the ages of keys at eviction: all heads, and the median of each."""
    figure, left, right = style.two_axes()
    edges, counts = np.array(measured["lifetime_edges"]), np.array(measured["lifetime_counts"])
    style.style_axes(left)
    style.label_axes(left, "Age at eviction (tokens)", "Share of evicted keys")
    borders = edges - 0.5  # centres bars of one age on that age
    left.bar(borders[:-1], counts / counts.sum(), np.diff(edges), align="edge", color=style.BLUE, lw=0)
    left.yaxis.set_major_formatter(style.PERCENT)
    style.integer_ticks(left.xaxis)
    left.set_xlim(borders[0], borders[-1])
    medians = np.array(measured["lifetime_median"], dtype=float)
    _heat(right, medians, "median", "KV head", "{x:.0f}", float(np.nanmax(medians, initial=1.0)))
    _color_bar(figure, right, "tokens")
    return figure


def _heat(
    axes: Axes,
    table: Sequence[Sequence[float]] | np.ndarray,
    title: str,
    x_label: str,
    form: str,
    highest: float,
) -> None:
    """Draw a cell for each layer and head, with its number if the table is small."""
    values = np.array(table, dtype=float)
    axes.imshow(values, cmap="viridis", vmin=0.0, vmax=highest, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=style.SMALL, color=style.INK, loc="left")
    style.label_axes(axes, x_label, "Layer")
    axes.tick_params(labelsize=style.SMALL, length=0)
    axes.spines[:].set_visible(False)
    style.integer_ticks(axes.xaxis, axes.yaxis)
    if max(values.shape) > MAX_ANNOTATED:
        return
    for (layer, head), value in np.ndenumerate(values):
        if np.isfinite(value):
            color = "white" if value < 0.6 * highest else style.INK
            text = form.format(x=value)
            axes.text(head, layer, text, ha="center", va="center", fontsize=style.SMALL, color=color)


def _color_bar(figure: Figure, axes: Axes, name: str, form: str | None = None) -> None:
    """Add the colour bar of a table."""
    bar = figure.colorbar(axes.images[0], ax=axes, format=form)
    bar.set_label(name, fontsize=style.SMALL, color=style.INK)
    bar.ax.tick_params(labelsize=style.SMALL, length=0)
    bar.outline.set_visible(False)


MAX_PANELS = 4
"""Most layers, and most heads, with a panel."""

MAX_LABELLED_TOKENS = 64
"""Longest sequence that gets token labels."""

MAX_LABEL_CHARACTERS = 10
"""Longest token label that is not shortened."""


def key_lifetimes(rollout: Rollout, row: int, token_labels: Sequence[str] | None = None) -> Figure:
    """Draw the lifetime of each key of one sequence, in a panel per layer and KV head.

    Args:
        token_labels: one label per token of the row, without padding; not drawn for a long row.

    Raises:
        ValueError: `row` is out of range, or `token_labels` does not have one label per token.
    """
    if not 0 <= row < len(rollout.input_ids):
        raise ValueError(f"row must be from 0 to {len(rollout.input_ids) - 1}, got {row}")
    attention_mask = rollout.attention_mask[row].cpu()
    n_tokens = int(attention_mask.sum())
    if token_labels is not None and len(token_labels) != n_tokens:
        raise ValueError(
            f"{len(token_labels)} token_labels for {n_tokens} tokens in row {row}; give one per token"
        )
    n_keys = max(n_tokens - 1, 0)
    n_prompt = int((attention_mask & ~rollout.response_mask[row].cpu()).sum())
    first = int(attention_mask.int().argmax())
    evicted_at = rollout.evicted_at[row].cpu()[..., attention_mask][..., :n_keys]
    layers, heads = (_evenly_chosen(size) for size in evicted_at.shape[:2])
    labels = [] if token_labels is None or n_tokens > MAX_LABELLED_TOKENS else token_labels[:n_keys]
    figure, grid = _panels(len(layers), len(heads), len(labels))
    for axes_row, layer in zip(grid, layers, strict=True):
        for axes, head in zip(axes_row, heads, strict=True):
            _draw_lifetimes(axes, evicted_at[layer, head], first, n_prompt)
            axes.set_title(f"layer {layer} · head {head}", fontsize=style.SMALL, color=style.INK, loc="left")
        if labels:
            shown = [_visible(label) for label in labels]
            axes_row[0].set_yticks(np.arange(n_keys) + 0.5, shown, family="monospace", parse_math=False)
            axes_row[0].tick_params(axis="y", labelsize=6, length=0)
    figure.supxlabel("Query (token of the sequence)", fontsize=style.NORMAL, color=style.INK)
    figure.supylabel("Key (token of the sequence)", fontsize=style.NORMAL, color=style.INK)
    handles = [
        Patch(color=style.BLUE, label="kept to the end"),
        Patch(color=style.SAND, label="evicted"),
        *[line for line in grid[0][0].lines if line.get_label() == "response begins"][:1],
    ]
    legend = figure.legend(
        handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=style.SMALL
    )
    style.color_texts(legend.get_texts())
    return figure


def _evenly_chosen(size: int) -> list[int]:
    """Return at most MAX_PANELS evenly spaced indices."""
    return sorted({round(index) for index in np.linspace(0, size - 1, min(size, MAX_PANELS))})


def _visible(label: str) -> str:
    """Return a token as one short printable line, with symbols for spaces and line breaks."""
    signs = label.replace(" ", "␣").replace("\n", "⏎")
    escaped = "".join(character if character.isprintable() else repr(character)[1:-1] for character in signs)
    return escaped if len(escaped) <= MAX_LABEL_CHARACTERS else escaped[: MAX_LABEL_CHARACTERS - 1] + "…"


def _draw_lifetimes(axes: Axes, evicted_at: Int[Tensor, " seq"], first: int, n_prompt: int) -> None:
    n_keys = len(evicted_at)
    born = np.arange(n_keys)
    is_kept = (evicted_at == NEVER).numpy()
    end = np.where(is_kept, n_keys, evicted_at.numpy().astype(np.int64) - first)
    x = np.stack([born, end, end, born], axis=-1)
    y = born[:, None] + np.array([0.08, 0.08, 0.92, 0.92])
    colors = [style.BLUE if kept else style.SAND for kept in is_kept]
    axes.add_collection(PolyCollection(list(np.stack([x, y], axis=-1)), facecolors=colors, linewidths=0))
    axes.axvline(n_prompt, color=style.INK, lw=0.8, ls=":", label="response begins")
    axes.axhline(n_prompt, color=style.INK, lw=0.8, ls=":")
    axes.set_xlim(0, max(n_keys, 1))
    axes.set_ylim(max(n_keys, 1), 0)


def _panels(n_rows: int, n_columns: int, n_labels: int) -> tuple[Figure, list[list[Axes]]]:
    height = max(min(style.FULL_WIDTH / n_columns, 2.4), 0.095 * n_labels)
    figure = Figure(figsize=(style.FULL_WIDTH, 0.8 + n_rows * (height + 0.25)), dpi=100, layout="constrained")
    grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat:
        style.style_axes(axes)
        axes.grid(visible=False)
        style.integer_ticks(axes.xaxis, axes.yaxis)
    return figure, grid.tolist()
