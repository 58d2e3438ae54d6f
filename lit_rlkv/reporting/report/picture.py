"""A picture as reports and loggers take it."""

import re
from typing import NamedTuple

from matplotlib.figure import Figure


class Picture(NamedTuple):
    """A figure with what stands under it."""

    figure: Figure
    name: str
    caption: str

    @property
    def key(self) -> str:
        """What a logger calls it: figures/cache_fill."""
        return "figures/" + re.sub(r"\W+", "_", self.name.lower())
