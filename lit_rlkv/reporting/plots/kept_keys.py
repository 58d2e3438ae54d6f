"""Figure of the keys that a cache kept and evicted."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lit_rlkv.reporting.plots import style

MAX_LABELLED_TOKENS = 64
"""Longest sequence that gets token labels."""
MAX_LABEL_CHARACTERS = 10
"""Longest token label that is not shortened."""


def key_lifetimes(lifetimes: Mapping[str, Any]) -> Figure:
    """Draw the lifetime of each key of one sequence, in a panel per layer and KV head.

    Args:
        lifetimes: a `lifetimes_record`; its token labels are not drawn for a long sequence.
    """
    n_keys, layers, heads = (lifetimes[name] for name in ("n_keys", "layers", "heads"))
    labels = lifetimes["labels"] if lifetimes["labels"] and n_keys < MAX_LABELLED_TOKENS else []
    height = max(min(style.FULL_WIDTH / len(heads), 2.4), 0.095 * len(labels))
    size = (style.FULL_WIDTH, 0.8 + len(layers) * (height + 0.25))
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    grid = figure.subplots(len(layers), len(heads), sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat:
        style.style_axes(axes)
        axes.grid(visible=False)
        style.integer_ticks(axes.xaxis, axes.yaxis)
    for axes_row, layer, ends in zip(grid, layers, lifetimes["evicted_at"], strict=True):
        for axes, head, evicted_at in zip(axes_row, heads, ends, strict=True):
            _draw_panel(axes, evicted_at, lifetimes["n_prompt"])
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
        *[line for line in grid[0, 0].lines if line.get_label() == "response begins"][:1],
    ]
    legend = figure.legend(
        handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=style.SMALL
    )
    style.color_texts(legend.get_texts())
    return figure


def _visible(label: str) -> str:
    """Return a token as one short printable line, with symbols for spaces and line breaks."""
    signs = label.replace(" ", "␣").replace("\n", "⏎")
    escaped = "".join(character if character.isprintable() else repr(character)[1:-1] for character in signs)
    return escaped if len(escaped) <= MAX_LABEL_CHARACTERS else escaped[: MAX_LABEL_CHARACTERS - 1] + "…"


def _draw_panel(axes: Axes, evicted_at: Sequence[int | None], n_prompt: int) -> None:
    """Draw the lifetimes of the keys of one layer and KV head."""
    n_keys = len(evicted_at)
    born = np.arange(n_keys)
    end = np.array([n_keys if query is None else query for query in evicted_at])
    x = np.stack([born, end, end, born], axis=-1)
    y = born[:, None] + np.array([0.08, 0.08, 0.92, 0.92])
    colors = [style.BLUE if query is None else style.SAND for query in evicted_at]
    bars = PolyCollection(list(np.stack([x, y], axis=-1)), facecolors=colors, linewidths=0)
    bars.set_rasterized(n_keys > style.MAX_VECTOR_SHAPES)
    axes.add_collection(bars)
    axes.axvline(n_prompt, color=style.INK, lw=0.8, ls=":", label="response begins")
    axes.axhline(n_prompt, color=style.INK, lw=0.8, ls=":")
    axes.set_xlim(0, max(n_keys, 1))
    axes.set_ylim(max(n_keys, 1), 0)
