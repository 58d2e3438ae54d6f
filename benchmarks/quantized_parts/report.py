"""Tables and figure of the rounded caches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter, ScalarFormatter
from pretrained_parts.results import Group
from quantized_parts.answers import BUDGETS, DTYPES, KINDS, POLICY
from text_table import text_table

from lit_rlkv.reporting.plots.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    SMALL,
    color_texts,
    label_axes,
    style_axes,
)

Row = dict[str, Any]
STYLES = {None: (INK, "o"), "int8": (BLUE, "s"), "fp8": (GREEN, "^"), "int4": (ORANGE, "D")}
LABELS = {"recall": "documents", "few_shot": "few-shot questions"}
DENSE_LINE = (0, (5, 3))
DPI = 200


def name_of(dtype: str | None) -> str:
    return "16 bit" if dtype is None else dtype


def line(row: Row) -> str:
    """Return one line on a measured cell."""
    cell = row["cell"]
    if cell["block"] == "schemes":
        return f"{cell['bits']} bits, {cell['scheme']}: KL {row['kl']:.2g} nats per token"
    if cell["block"] == "replay":
        gap, moved = row["gap"], f", by itself {row['by_itself']['mean']:.1e}" if cell["dtype"] else ""
        name = f"replay {cell['precision']} {cell['policy']} {name_of(cell['dtype'])}"
        return f"{name}: gap mean {gap['mean']:.1e} max {gap['max']:.1e}{moved}"
    if cell["block"] == "drift":
        errors = f"{row['by_itself']:.2f} by itself, {row['by_record']:.2f} by the record"
        return f"{cell['dtype']}, moved by {cell['steps']} steps: error {errors}"
    group = Group((row,))
    return (
        f"{cell['block']} {cell['policy']} {name_of(cell['dtype'])} {cell['budget'] or 'all'}: "
        f"right {sum(row['right'])} of {len(row['right'])}, KL {group.kl:.4f}"
    )


def _group(rows: Sequence[Row], kind: str, dtype: str | None, keys: int | None) -> Group | None:
    wanted = (kind, dtype, keys)
    found = [
        row
        for row in rows
        if tuple(row["cell"].get(name) for name in ("block", "dtype", "keys_16bit")) == wanted
    ]
    return Group(tuple(found)) if found else None


def tables(rows: Sequence[Row]) -> str:
    """Return the tables of the page."""
    parts = []
    for kind in KINDS:
        headings = ["dtype", "all keys", *(f"bytes of {keys}" for keys in BUDGETS)]
        body = []
        for dtype in DTYPES:
            groups = [_group(rows, kind, dtype, keys) for keys in (None, *BUDGETS)]
            body.append([name_of(dtype), *map(_cell, groups)])
        title = f"{LABELS[kind]}, {POLICY[kind]}: keys; right answers; KL in nats per token"
        parts += [title, text_table(headings, body), ""]
    headings = [
        *("model", "cache", "dtype", "gap mean", "gap max", "numbers apart"),
        *("by itself: mean", "max", "numbers apart", "not rounding: mean", "max"),
    ]
    body = [_replay_cells(row) for row in rows if row["cell"]["block"] == "replay"]
    parts += [line(row) for row in rows if row["cell"]["block"] in ("schemes", "drift")]
    return "\n".join(
        [*parts, "replay: |log-prob of the learner - of the sampler|", text_table(headings, body)]
    )


def _cell(group: Group | None) -> str:
    if group is None or group.accuracy is None:
        return ""
    right = sum(group.rows[0]["right"])
    keys = group.rows[0]["cell"]["budget"]
    return f"{keys or 'all'}; {right} of {group.n_prompts}; {group.kl:.2g}"


def _replay_cells(row: Row) -> list[str]:
    cell = row["cell"]
    found = [cell["precision"], cell["policy"], name_of(cell["dtype"])]
    for learner in ("gap", "by_itself", "unrounded"):
        found += [f"{row[learner][name]:.1e}" if learner in row else "" for name in ("mean", "max")]
        if learner != "unrounded":
            found.append(f"{row[f'{learner}_moved']:.1e}" if cell["dtype"] else "")
    return found


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw right answers and KL of both kinds of prompts by bytes."""
    figure = Figure(figsize=(7.6, 6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    for (right, kl), kind in zip(panels, KINDS, strict=True):
        _panel(right, rows, kind, lambda group: group.accuracy.value if group.accuracy else None)
        _panel(kl, rows, kind, lambda group: group.kl)
        right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        right.set_ylim(-0.04, 1.04)
        kl.set_yscale("log")
        label = "Bytes per head, in keys of 16 bit" if kind == KINDS[-1] else ""
        label_axes(right, label, f"Right, {LABELS[kind]}")
        label_axes(kl, label, "KL, nats per token")
    handles, labels = panels[0][0].get_legend_handles_labels()
    found = figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=SMALL)
    color_texts(found.get_texts())
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, facecolor="white", metadata={"Software": None})


def _panel(axes: Axes, rows: Sequence[Row], kind: str, value: Any) -> None:
    """Draw a line for each dtype; the dashed one is all keys in 16 bit, or rounded."""
    for dtype, (color, marker) in STYLES.items():
        groups = [(keys, _group(rows, kind, dtype, keys)) for keys in BUDGETS]
        found = [(keys, value(group)) for keys, group in groups if group is not None]
        axes.plot(*zip(*found, strict=True), marker=marker, color=color, lw=1.5, ms=5, label=name_of(dtype))
    style_axes(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BUDGETS)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
