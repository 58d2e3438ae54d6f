"""Pictures of where the time went."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from lit_rlkv.reporting.plots.style import BLUE, INK, NORMAL, SMALL, nothing, single


def time_per_stage(stage_seconds: Mapping[str, float | int]) -> Figure:
    """Wall-clock seconds of each stage, in the order they ran."""
    figure, axes = single("Seconds", "", height=0.9 + 0.34 * len(stage_seconds))
    if not stage_seconds:
        return nothing(figure, axes, "no stage was timed")
    bars = axes.barh(list(stage_seconds), list(stage_seconds.values()), color=BLUE, height=0.6)
    axes.bar_label(bars, fmt="{:,.1f}", padding=4, fontsize=SMALL, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", labelsize=NORMAL, labelcolor=INK)
    return figure
