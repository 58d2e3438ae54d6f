"""Figures of the keys that a cache kept and evicted: counts, attention, ages, lifetimes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from lit_rlkv.diagnostics.eviction_counts import cached_keys as layer_cached_keys
from lit_rlkv.diagnostics.eviction_counts import response_queries
from lit_rlkv.reporting.plots.style import (
    BLUE,
    FULL_WIDTH,
    HEIGHT,
    INK,
    MUTED,
    NORMAL,
    SAND,
    SMALL,
    VERMILLION,
    color_texts,
    empty_figure,
    labelled_line,
    legend,
    single_axes,
    style_axes,
)
from lit_rlkv.types import NEVER, Rollout


def cache_fill(rollout: Rollout, budget: int | None = None, interval: int | None = None) -> Figure:
    """Draw the cached keys at each query over all sequences, layers and heads, beside a dense cache."""
    figure, axes = single_axes("Tokens since the response began", "Cached keys per layer and KV head")
    is_query = queries(rollout)
    column = torch.arange(is_query.shape[1]) - _response_start(rollout)
    is_shown = is_query.any(dim=0)
    if not is_shown.any():
        return empty_figure(figure, axes, "the rollout is empty")
    x = column[is_shown].numpy()
    live = _over_queries(cached_keys(rollout), is_query)[:, is_shown]
    dense = _over_queries(rollout.attention_mask.cpu().cumsum(dim=1)[:, None, None], is_query)[:, is_shown]
    low, high = np.nanmin(live, axis=0), np.nanmax(live, axis=0)
    axes.plot(x, np.nanmean(dense, axis=0), color=MUTED, lw=1.4, ls=(0, (5, 3)), label="dense, mean")
    axes.fill_between(x, low, high, color=BLUE, alpha=0.18, lw=0, label="cached, least to most")
    axes.plot(x, np.nanmean(live, axis=0), color=BLUE, lw=2, label="cached, mean")
    axes.axvline(0, color=INK, lw=0.8, ls=":")
    if budget is not None:
        labelled_line(axes, budget, f"budget {budget}", "top")
    if budget is not None and interval is not None:
        labelled_line(axes, budget + interval, f"slots {budget + interval}", "bottom")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes)
    return figure


def cached_keys(rollout: Rollout) -> Int[Tensor, "batch layer kv_head seq"]:
    """Return the cached keys at each column: written and not yet evicted."""
    n_layers = rollout.evicted_at.shape[1]
    return torch.stack([layer_cached_keys(rollout, layer) for layer in range(n_layers)], dim=1).cpu()


def queries(rollout: Rollout) -> Bool[Tensor, "batch seq"]:
    """Return a mask of the tokens that queried the cache: all but the last of each sequence."""
    attention_mask = rollout.attention_mask.cpu()
    return attention_mask & response_queries(attention_mask)


def _over_queries(counts: Tensor, is_query: Tensor) -> np.ndarray:
    """Return the counts as [sequence × layer × head, column], NaN outside the queries."""
    values = counts.double().masked_fill(~is_query[:, None, None].expand_as(counts), torch.nan)
    return values.flatten(0, 2).numpy()


def _response_start(rollout: Rollout) -> int:
    is_response_column = rollout.response_mask.any(dim=0).cpu()
    return int(is_response_column.long().argmax()) if is_response_column.any() else len(is_response_column)


Measured = Mapping[str, Any]
"""A line of diagnostics.jsonl from the diagnostic `cache`."""

MAX_ANNOTATED = 12
"""Most rows or columns of a table whose cells show numbers."""


def attention_kept(measured: Measured | None) -> Figure:
    """Draw the dense policy's attention on keys in the sampler's cache, by layer and query head."""
    figure, left, right = _pair()
    if measured is None or "attention_kept" not in measured:
        right.set_axis_off()
        return empty_figure(figure, left, "no attention was measured")
    for axes, name, title in (
        (left, "attention_kept", "mean over queries"),
        (right, "attention_kept_p05", "5th percentile over queries"),
    ):
        _heat(axes, measured[name], title, "Query head", "{:.0%}", 0.0, 1.0)
    _color_bar(figure, right, "attention kept", PercentFormatter(1, decimals=0))
    return figure


def attention_on_evicted(measured: Measured | None) -> Figure:
    """Draw the dense policy's attention on evicted keys at each position of the response."""
    figure, axes = single_axes("Position in the response", "Attention on evicted keys")
    if measured is None or "attention_on_dead" not in measured:
        return empty_figure(figure, axes, "no attention was measured")
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
    """Draw the ages of keys at eviction: all heads, and the median of each."""
    figure, left, right = _pair()
    if measured is None or "lifetime_counts" not in measured:
        right.set_axis_off()
        return empty_figure(figure, left, "no key was evicted")
    edges, counts = np.array(measured["lifetime_edges"]), np.array(measured["lifetime_counts"])
    style_axes(left)
    borders = edges - 0.5  # centres bars of one age on that age
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
    _color_bar(figure, right, "tokens", None)
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
    """Draw a cell for each layer and head, with its number if the table is small."""
    values = np.array(table, dtype=float)
    axes.imshow(values, cmap="viridis", vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=SMALL, color=INK, loc="left")
    axes.set_xlabel(x_label, fontsize=NORMAL, color=INK)
    axes.set_ylabel("Layer", fontsize=NORMAL, color=INK)
    axes.tick_params(labelsize=SMALL, length=0)
    axes.spines[:].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if max(values.shape) > MAX_ANNOTATED:
        return
    for (layer, head), value in np.ndenumerate(values):
        if np.isfinite(value):
            color = "white" if value < low + 0.6 * (high - low) else INK
            text = form.format(value)
            axes.text(head, layer, text, ha="center", va="center", fontsize=SMALL, color=color)


def _color_bar(figure: Figure, axes: Axes, name: str, formatter: PercentFormatter | None) -> None:
    """Add the colour bar of a table."""
    bar = figure.colorbar(axes.images[0], ax=axes, format=formatter)
    bar.set_label(name, fontsize=SMALL, color=INK)
    bar.ax.tick_params(labelsize=SMALL, length=0)
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
    has_labels = token_labels is not None and n_tokens <= MAX_LABELLED_TOKENS
    figure, grid = _panels(len(layers), len(heads), n_keys if has_labels else 0)
    for axes_row, layer in zip(grid, layers, strict=True):
        for axes, head in zip(axes_row, heads, strict=True):
            _draw_lifetimes(axes, evicted_at[layer, head], first, n_prompt)
            axes.set_title(f"layer {layer} · head {head}", fontsize=SMALL, color=INK, loc="left")
        if has_labels and token_labels is not None:
            shown = [_visible(label) for label in token_labels[:n_keys]]
            axes_row[0].set_yticks(np.arange(n_keys) + 0.5, shown, family="monospace", parse_math=False)
            axes_row[0].tick_params(axis="y", labelsize=6, length=0)
    figure.supxlabel("Query (token of the sequence)", fontsize=NORMAL, color=INK)
    figure.supylabel("Key (token of the sequence)", fontsize=NORMAL, color=INK)
    handles = [
        Patch(color=BLUE, label="kept to the end"),
        Patch(color=SAND, label="evicted"),
        *[line for line in grid[0][0].lines if line.get_label() == "response begins"][:1],
    ]
    legend = figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=SMALL)
    color_texts(legend.get_texts())
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
    corners = np.stack(
        [
            np.stack([born, born + 0.08], -1),
            np.stack([end, born + 0.08], -1),
            np.stack([end, born + 0.92], -1),
            np.stack([born, born + 0.92], -1),
        ],
        axis=1,
    )
    colors = [BLUE if kept else SAND for kept in is_kept]
    axes.add_collection(PolyCollection(list(corners), facecolors=colors, linewidths=0))
    axes.axvline(n_prompt, color=INK, lw=0.8, ls=":", label="response begins")
    axes.axhline(n_prompt, color=INK, lw=0.8, ls=":")
    axes.set_xlim(0, max(n_keys, 1))
    axes.set_ylim(max(n_keys, 1), 0)


def _panels(n_rows: int, n_columns: int, n_labels: int) -> tuple[Figure, list[list[Axes]]]:
    height = max(min(FULL_WIDTH / n_columns, 2.4), 0.095 * n_labels)
    figure = Figure(figsize=(FULL_WIDTH, 0.8 + n_rows * (height + 0.25)), dpi=100, layout="constrained")
    grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat:
        style_axes(axes)
        axes.grid(visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, grid.tolist()
