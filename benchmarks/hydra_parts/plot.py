"""The figure of the memory table: what each phase of each variant holds at its peak."""

from collections.abc import Sequence

from hydra_parts.measure import Held
from hydra_parts.tables import MB, Result
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_rlkv.reporting.plots.style import (
    BLUE,
    FULL_WIDTH,
    GREEN,
    INK,
    NORMAL,
    PURPLE,
    SAND,
    SMALL,
    VERMILLION,
    style_axes,
)

COLORS = {
    "weights": BLUE,
    "adapters and heads": GREEN,
    "Adam": PURPLE,
    "gradients": VERMILLION,
    "KV cache": INK,
    "activations and the rest": SAND,
}
BAR = 0.8


def parts_at_peak(held: Held, phase: str) -> dict[str, int]:
    """The bytes of each kind in a phase's peak; activations are what nothing else accounts for."""
    found = held.phases[phase]
    parts = {
        "weights": held.weights,
        "adapters and heads": held.adapters + held.heads,
        "Adam": held.optimizer,
        "gradients": found.gradient_bytes,
        "KV cache": held.kv if phase == "sampling" else 0,
    }
    return parts | {"activations and the rest": found.peak_bytes - sum(parts.values())}


def draw(results: Sequence[Result]) -> Figure:
    """A stacked bar for each phase of each variant; a dashed line at the peak of SFT where it is there."""
    n_bars = sum(len(result.held.phases) for result in results)
    height = 1.1 + 0.2 * n_bars + 0.15 * len(results)
    figure = Figure(figsize=(FULL_WIDTH, height), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    place, ticks, labels = 0.0, [], []
    for result in results:
        for number, phase in enumerate(result.held.phases):
            _bar(axes, place, parts_at_peak(result.held, phase))
            ticks.append(place)
            labels.append(f"{result.variant}   {phase:>8}" if number == 0 else phase)
            place += 1
        place += 0.7
        if result.variant == "sft":
            axes.axvline(result.held.peak / MB, color=INK, lw=0.9, ls=(0, (5, 3)), label="peak of SFT")
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"MB at the peak of a phase, batch {results[0].batch}", fontsize=NORMAL, color=INK)
    style_axes(axes)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.08, y=0.02)
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=7, frameon=False, fontsize=SMALL, borderaxespad=0.2
    )
    return figure


def _bar(axes: Axes, place: float, parts: dict[str, int]) -> None:
    left = 0.0
    for name, n_bytes in parts.items():
        label = f"_{name}" if place else name  # one entry each in the legend
        axes.barh(place, n_bytes / MB, BAR, left=left, color=COLORS[name], label=label)
        left += n_bytes / MB
    axes.annotate(
        f"{left:,.0f}" if left >= 100 else f"{left:.1f}",
        (left, place),
        (4, 0),
        textcoords="offset points",
        va="center",
        fontsize=SMALL,
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )
