"""The figure of the pretrained benchmark: accuracy, divergence, its growth, what reweighting keeps."""

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
    line_heights,
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
    "random": (INK, "x"),
}
"""Colour and marker of each policy."""
DPI = 200


def draw(results: Results, budget: int, path: Path) -> None:
    """Draw the four panels; those without results stay empty."""
    figure = Figure(figsize=(7.6, 6.6), layout="constrained")
    (accuracy, divergence), (growth, weights) = figure.subplots(2, 2)
    for policy in results.policies:
        _accuracy(accuracy, results, policy)
        _divergence(divergence, results, policy)
        _growth(growth, results, policy, budget)
        _weights(weights, results.rollout("wide", policy), policy)
    dense = results.dense("recall")
    if dense and dense.accuracy:
        accuracy.axhline(dense.accuracy.value, color=INK, lw=1, ls=(0, (5, 3)), label="all keys")
    for axes in (accuracy, divergence, growth, weights):
        style_axes(axes)
        if not len(line_heights(axes)):
            continue
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
    for axes in (accuracy, divergence):
        axes.set_xticks(results.budgets)
    for axes in (divergence, growth):
        if len(line_heights(axes)):
            axes.set_yscale("log")
    accuracy.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    accuracy.set_ylim(-0.04, 1.04)
    weights.set_ylim(0, 1.04)
    label_axes(accuracy, "Budget, keys per head", "Right answers on documents")
    label_axes(divergence, "Budget, keys per head", "KL in chats, nats per token")
    label_axes(growth, f"Token of the response, budget {budget}", "KL in chats, nats per token")
    label_axes(weights, "Tokens of the response", "Effective share of sequences")
    _floor(weights, results)
    handles, labels = accuracy.get_legend_handles_labels()
    found = figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=SMALL)
    color_texts(found.get_texts())
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, facecolor="white", metadata={"Software": None})


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], policy: str) -> None:
    color, marker = STYLES.get(policy, (GRID, "."))
    axes.plot(x, y, marker=marker, color=color, lw=1.5, ms=5, label=policy)


def _accuracy(axes: Axes, results: Results, policy: str) -> None:
    groups = [(budget, results.group("recall", policy, budget)) for budget in results.budgets]
    found = [(budget, group.accuracy.value) for budget, group in groups if group and group.accuracy]
    _line(axes, [x for x, _ in found], [y for _, y in found], policy)


def _divergence(axes: Axes, results: Results, policy: str) -> None:
    groups = [(budget, results.group("chat", policy, budget)) for budget in results.budgets]
    found = [(budget, group.kl) for budget, group in groups if group]
    _line(axes, [x for x, _ in found], [y for _, y in found], policy)


def _growth(axes: Axes, results: Results, policy: str, budget: int) -> None:
    group = results.group("chat", policy, budget)
    if group:
        # The first token is predicted with all keys.
        middles = [start + (end - start + 1) / 2 for start, end in pairwise(POSITIONS)]
        middles.append(1.5 * POSITIONS[-1])
        kls = np.array(group.kl_by_position)
        _line(axes, middles[1:], kls[1:].tolist(), policy)


def _weights(axes: Axes, row: Row | None, policy: str) -> None:
    if row:
        points = sorted((int(n), one["ess_sequence"]) for n, one in row["by_length"].items())
        _line(axes, [x for x, _ in points], [y for _, y in points], policy)


def _floor(axes: Axes, results: Results) -> None:
    """Mark the smallest possible effective share, that of one sequence."""
    rows = results.rollouts("wide")
    if rows:
        n = next(iter(rows.values()))["cell"]["rows"]
        axes.axhline(1 / n, color=MUTED, lw=1, ls=(0, (5, 3)))
        left = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
        axes.annotate(f"one of {n}", (0.98, 1 / n), ha="right", fontsize=SMALL, color=MUTED, **left)
