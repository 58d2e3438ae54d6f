"""The picture of what each correction would make of the rollouts of a run."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from lit_rlkv.reporting.plots.history import History, series
from lit_rlkv.reporting.plots.style import (
    BLUE,
    FULL_WIDTH,
    GREEN,
    HEIGHT,
    INK,
    MUTED,
    NORMAL,
    PURPLE,
    VERMILLION,
    calm,
    legend,
    nothing,
)

ARMS = {
    "token_ratio": ("ρ of tokens", MUTED),
    "sequence_ratio": ("Π ρ of responses", VERMILLION),
    "tis": ("tis", BLUE),
    "mis": ("mis", GREEN),
    "sparse_rl": ("sparse_rl", PURPLE),
}
"""What each arm is called in the legend, and its colour."""


def effective_samples(history: History) -> Figure:
    """Effective sample size of each correction, and the share of actions that it rejects or clips."""
    figure = Figure(figsize=(FULL_WIDTH, HEIGHT), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, label in ((left, "Effective sample size"), (right, "Rejected or clipped actions")):
        calm(axes)
        axes.set_xlabel("Iteration", fontsize=NORMAL, color=INK)
        axes.set_ylabel(label, fontsize=NORMAL, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for arm, (name, color) in ARMS.items():
        for axes, statistic, verb in (
            (left, "ess", ""),
            (right, "rejected", " rejects"),
            (right, "clipped", " clips"),
        ):
            iteration, value = series(history, f"kv/arms/{arm}/{statistic}")
            if len(value):
                axes.plot(iteration, value, color=color, lw=1.6, marker=".", ms=5, label=f"{name}{verb}")
    if not left.lines:
        right.set_axis_off()
        return nothing(figure, left, "no arm was measured")
    sizes = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in left.lines])
    lowest = sizes[sizes > 0].min(initial=1.0)  # an arm that rejects all has no size to draw
    left.set_yscale("log")
    # Whole decades, so that there is a label on the axis however close the values are.
    left.set_ylim(10 ** np.floor(np.log10(lowest) - 0.01), 1.3)
    left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    legend(left, n_columns=5)
    if right.lines:
        legend(right)
    return figure
