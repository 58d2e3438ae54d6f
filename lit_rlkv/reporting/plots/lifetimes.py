"""The picture of key lifetimes: what each head still held of one sequence, and until when."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from lit_rlkv.reporting.plots.style import BLUE, FULL_WIDTH, INK, NORMAL, SAND, SMALL, calm, ink
from lit_rlkv.types import NEVER, Rollout

MAX_PANELS = 4
"""Layers, and heads, at most."""

MAX_LABELLED_TOKENS = 64
"""Longest sequence whose tokens are written beside their lifetimes."""

MAX_LABEL_CHARACTERS = 10
"""Longest token written whole there."""


def key_lifetimes(rollout: Rollout, row: int, token_labels: Sequence[str] | None = None) -> Figure:
    """One sequence, a panel per layer and KV head: each key's bar runs from its own token to its eviction.

    Args:
        token_labels: what to write beside each token of the row, padding not counted; unused on a long row.

    Raises:
        ValueError: a row that the rollout does not have, or not one label per token.
    """
    if not 0 <= row < len(rollout.input_ids):
        raise ValueError(f"row={row} is not in a rollout of {len(rollout.input_ids)}; give 0 to its size - 1")
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
    ink(legend.get_texts())
    return figure


def _evenly_chosen(size: int) -> list[int]:
    """At most MAX_PANELS indices, from the first to the last."""
    return sorted({round(index) for index in np.linspace(0, size - 1, min(size, MAX_PANELS))})


def _visible(label: str) -> str:
    """A token as one short line: blanks and line breaks as signs, control characters as escapes."""
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
        calm(axes)
        axes.grid(visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, grid.tolist()
