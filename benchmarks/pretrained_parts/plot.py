"""The figure of the pretrained benchmark: right answers, KL, and what reweighting keeps."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter, ScalarFormatter
from pretrained_parts.answers import POSITIONS
from pretrained_parts.results import Results, Row

from lit_rlkv.reporting.plots.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILLION,
    color_texts,
    label_axes,
    style_axes,
)

STYLES = {
    "streaming": (MUTED, "s"),
    "h2o": (ORANGE, "o"),
    "snapkv": (BLUE, "o"),
    "rkv": (SKY, "^"),
    "tova": (GREEN, "D"),
    "knorm": (PURPLE, "v"),
    "keydiff": ("#8c6bb1", "P"),
    "expected": (VERMILLION, "X"),
    "triattention": ("#a6761d", ">"),
    "vase": ("#e7298a", "*"),
    "gkv": ("#66a61e", "<"),
    "random": (INK, "x"),
}
"""Colour and marker of each policy."""
DPI = 200


def draw(results: Results, budget: int, path: Path) -> None:
    """Draw the six panels; those without results stay empty."""
    figure = Figure(figsize=(7.6, 9), layout="constrained")
    panels = figure.subplots(3, 2)
    (documents, shots), (divergence, growth), (sequences, tokens) = panels
    for policy in results.policies:
        _accuracy(documents, results, "recall", policy)
        _accuracy(shots, results, "few_shot", policy)
        _divergence(divergence, results, policy)
        _growth(growth, results, policy, budget)
        _weights(sequences, results.rollout("long", policy), "ess_sequence", policy)
        _weights(tokens, results.rollout("long", policy), "ess_tis", policy)
    _dense(documents, results, "recall")
    _dense(shots, results, "few_shot")
    for axes in panels.flat:
        style_axes(axes)
        if axes.lines:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_locator(NullLocator())
    for axes in (documents, shots, divergence):
        axes.set_xticks(results.budgets)
    for axes in (divergence, growth):
        if any((np.asarray(line.get_ydata(), float) > 0).any() for line in axes.lines):
            axes.set_yscale("log")
    for axes in (documents, shots):
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_ylim(-0.04, 1.04)
    for axes in (sequences, tokens):
        axes.set_ylim(0, 1.04)
    label_axes(documents, "Budget, keys per head", "Right answers on documents")
    label_axes(shots, "Budget, keys per head", "Right answers, few-shot")
    label_axes(divergence, "Budget, keys per head", "KL in chats, nats per token")
    label_axes(growth, f"Token of the response, budget {budget}", "KL in chats, nats per token")
    label_axes(sequences, "Tokens of the response", "Effective share of sequences")
    label_axes(tokens, "Tokens of the response", "Effective share of tokens, tis")
    _floor(sequences, results)
    handles, labels = documents.get_legend_handles_labels()
    found = figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=SMALL)
    color_texts(found.get_texts())
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, facecolor="white", metadata={"Software": None})


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], policy: str) -> None:
    color, marker = STYLES.get(policy, (GRID, "."))
    axes.plot(x, y, marker=marker, color=color, lw=1.5, ms=5, label=policy)


def _accuracy(axes: Axes, results: Results, kind: str, policy: str) -> None:
    groups = [(budget, results.group(kind, policy, budget)) for budget in results.budgets]
    found = [(budget, group.accuracy.value) for budget, group in groups if group and group.accuracy]
    _line(axes, [x for x, _ in found], [y for _, y in found], policy)


def _dense(axes: Axes, results: Results, kind: str) -> None:
    """Mark the accuracy with all keys."""
    dense = results.dense(kind)
    if dense and dense.accuracy:
        axes.axhline(dense.accuracy.value, color=INK, lw=1, ls=(0, (5, 3)), label="all keys")


def _divergence(axes: Axes, results: Results, policy: str) -> None:
    groups = [(budget, results.group("chat", policy, budget)) for budget in results.budgets]
    found = [(budget, group.kl) for budget, group in groups if group]
    _line(axes, [x for x, _ in found], [y for _, y in found], policy)


def _growth(axes: Axes, results: Results, policy: str, budget: int) -> None:
    group = results.group("chat", policy, budget)
    if group:
        # Without the first token, which is predicted with all keys.
        middles = [start + (end - start + 1) / 2 for start, end in pairwise(POSITIONS)]
        middles.append(1.5 * POSITIONS[-1])
        _line(axes, middles[1:], group.kl_by_position[1:], policy)


def _weights(axes: Axes, row: Row | None, statistic: str, policy: str) -> None:
    if row:
        points = sorted((int(n), one[statistic]) for n, one in row["by_length"].items())
        _line(axes, [x for x, _ in points], [y for _, y in points], policy)


def _floor(axes: Axes, results: Results) -> None:
    """Mark the smallest possible effective share, that of one sequence."""
    rows = results.rollouts("long")
    if rows:
        n = next(iter(rows.values()))["cell"]["rows"]
        axes.axhline(1 / n, color=MUTED, lw=1, ls=(0, (5, 3)))
        left = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
        axes.annotate(f"one of {n}", (0.02, 1 / n), fontsize=SMALL, color=MUTED, **left)
