"""The picture of a cache over one rollout, and the counts that it draws."""

import numpy as np
import torch
from jaxtyping import Bool, Int
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from lit_rlkv.diagnostics.cache import live_keys as layer_live_keys
from lit_rlkv.diagnostics.cache import predicts
from lit_rlkv.reporting.plots.style import BLUE, INK, MUTED, legend, level, nothing, single
from lit_rlkv.types import Rollout


def cache_fill(rollout: Rollout, budget: int | None = None, interval: int | None = None) -> Figure:
    """Live keys at each query, over all sequences, layers and heads, beside what a dense cache would hold."""
    figure, axes = single("Tokens since the response began", "Live keys per layer and KV head")
    is_query = queries(rollout)
    column = torch.arange(is_query.shape[1]) - _response_start(rollout)
    is_shown = is_query.any(dim=0)
    if not is_shown.any():
        return nothing(figure, axes, "the rollout is empty")
    x = column[is_shown].numpy()
    live = _over_queries(live_keys(rollout), is_query)[:, is_shown]
    dense = _over_queries(rollout.attention_mask.cpu().cumsum(dim=1)[:, None, None], is_query)[:, is_shown]
    low, high = np.nanmin(live, axis=0), np.nanmax(live, axis=0)
    axes.plot(x, np.nanmean(dense, axis=0), color=MUTED, lw=1.4, ls=(0, (5, 3)), label="dense, mean")
    axes.fill_between(x, low, high, color=BLUE, alpha=0.18, lw=0, label="live, least to most")
    axes.plot(x, np.nanmean(live, axis=0), color=BLUE, lw=2, label="live, mean")
    axes.axvline(0, color=INK, lw=0.8, ls=":")
    if budget is not None:
        level(axes, budget, f"budget {budget}", "top")
    if budget is not None and interval is not None:
        level(axes, budget + interval, f"slots {budget + interval}", "bottom")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes)
    return figure


def live_keys(rollout: Rollout) -> Int[Tensor, "batch layer kv_head seq"]:
    """Keys born and not yet evicted at each column."""
    n_layers = rollout.evicted_at.shape[1]
    return torch.stack([layer_live_keys(rollout, layer) for layer in range(n_layers)], dim=1).cpu()


def queries(rollout: Rollout) -> Bool[Tensor, "batch seq"]:
    """True where the sampler asked the cache: on every token but the last, which it wrote and never read."""
    attention_mask = rollout.attention_mask.cpu()
    return attention_mask & predicts(attention_mask)


def _over_queries(counts: Tensor, is_query: Tensor) -> np.ndarray:
    """[sequence × layer × head, column], NaN outside the queries."""
    values = counts.double().masked_fill(~is_query[:, None, None].expand_as(counts), torch.nan)
    return values.flatten(0, 2).numpy()


def _response_start(rollout: Rollout) -> int:
    is_response_column = rollout.response_mask.any(dim=0).cpu()
    return int(is_response_column.long().argmax()) if is_response_column.any() else len(is_response_column)
