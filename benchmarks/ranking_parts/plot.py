"""The figure of the ranking: KL and recall against bytes, a line a policy."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter
from pretrained_parts.plot import DPI, STYLES
from ranking_parts.results import PARTS, Group, Results
from ranking_parts.setting import DTYPES
from ranking_parts.tables import NAMES
from ranking_parts.texts import RECALLS

from lit_rlkv.kvcache.policies import UNTRAINED
from lit_rlkv.reporting.plots.style import DASHED, INK, MUTED, SMALL, color_texts, label_axes, style_axes

MIB = 2**20


def draw(results: Results, path: Path) -> None:
    """Draw KL above and recall below, a column for each dtype, by the bytes of all that a sequence keeps."""
    figure = Figure(figsize=(7.6, 5.6), layout="constrained")
    panels = figure.subplots(2, len(DTYPES), sharex=True, sharey="row")
    for column, dtype in enumerate(DTYPES):
        above, below = panels[:, column]
        _panel(above, results, dtype, lambda group: group.kl.value)
        _panel(below, results, dtype, recalled_share)
        above.set_title(NAMES[dtype], fontsize=SMALL, color=INK, loc="left")
        above.set_yscale("log")
        above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        above.yaxis.set_minor_formatter(NullFormatter())
        if ends := _ends(results):  # the KL of int8 with all keys lies far below
            above.set_ylim(0.8 * min(ends), 1.25 * max(ends))
        below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        below.set_ylim(-0.04, 1.04)
        x_label = "MiB of a sequence" if column == 1 else ""
        label_axes(above, "", "" if column else "KL, nats per token")
        label_axes(below, x_label, "" if column else "Statements recalled")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    found = figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=SMALL)
    color_texts(found.get_texts())
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, facecolor="white", metadata={"Software": None})


def recalled_share(group: Group) -> float:
    """Return the share of all values that are recalled right."""
    found = [group.recalled(name) for name in RECALLS]
    return sum(right for right, _ in found) / sum(n for _, n in found)


def _ends(results: Results) -> list[float]:
    """Return the KL of every policy in every place."""
    groups = [results.groups(dtype, slots) for dtype in DTYPES for slots in results.sizes]
    return [group.kl.value for each in groups for group in each.values()]


def _panel(axes: Axes, results: Results, dtype: str | None, read: Callable[[Group], float]) -> None:
    style_axes(axes)
    for policy in UNTRAINED:
        groups = [each for slots in results.sizes if (each := results.groups(dtype, slots).get(policy))]
        if not groups:
            continue
        color, marker = STYLES[policy]
        x = [group.n_bytes(*PARTS) / MIB for group in groups]
        axes.plot(
            x, [read(group) for group in groups], marker=marker, color=color, lw=1.5, ms=5, label=policy
        )
    dense = results.dense(dtype)
    if dense and read(dense) > 0:
        axes.axhline(read(dense), color=MUTED, lw=1, ls=DASHED, label="all keys" if dtype is None else None)
