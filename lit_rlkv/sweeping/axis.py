"""Where the values of a parameter are on the axis of a picture."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

WIDE = 16
"""Ratio of the largest listed number to the smallest from which their axis is logarithmic."""


@dataclass(frozen=True)
class Scale:
    """Where the values of a listed parameter are on its axis."""

    places: dict[str, float]
    is_numeric: bool

    @property
    def is_log(self) -> bool:
        """Numbers that are far apart are listed by ratio."""
        lowest, highest = min(self.places.values()), max(self.places.values())
        return self.is_numeric and lowest > 0 and highest / lowest >= WIDE

    def apply(self, axes: Axes) -> None:
        """Ticks at the values and nowhere else."""
        if self.is_log:
            axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_locator(FixedLocator(list(self.places.values())))
        is_long = sum(map(len, self.places)) > 40
        axes.set_xticks(
            list(self.places.values()),
            list(self.places),
            rotation=30 if is_long else 0,
            ha="right" if is_long else "center",
        )
        if not self.is_numeric:
            axes.set_xlim(-0.5, len(self.places) - 0.5)


def scale_of(labels: Sequence[str]) -> Scale:
    """Numbers at their places, other values side by side."""
    try:
        places = {label: float(label) for label in labels}
    except ValueError:
        return Scale({label: float(index) for index, label in enumerate(labels)}, is_numeric=False)
    return Scale(places, is_numeric=True)
