"""The picture of which layer's eviction moves the policy."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lit_rlkv.reporting.plots.style import BLUE, INK, VERMILLION, legend, nothing, single


def layer_mismatch(first: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> Figure:
    """KL from the dense policy when one layer alone had evicted its keys, layer by layer.

    Args:
        first: the first line of diagnostics.jsonl that the diagnostic `layers` has written, to compare with.
        last: the line to draw.
    """
    figure, axes = single("Layer that evicts", "KL from the dense policy (nats)")
    if first is None or last is None:
        return nothing(figure, axes, "no layer was measured")
    layer = np.arange(len(last["layer_kl"]))
    axes.bar(layer, last["layer_kl"], color=BLUE, width=0.6, label=f"iteration {last['iteration']}")
    if first["iteration"] != last["iteration"]:
        axes.plot(
            layer, first["layer_kl"], "o", mfc="white", mec=INK, ms=5, label=f"iteration {first['iteration']}"
        )
    axes.axhline(last["all_layers_kl"], color=VERMILLION, lw=1.4, ls=(0, (5, 3)), label="all layers evict")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes)
    return figure
