"""Record of a rollout's evictions for the figures: plain numbers that a run folder keeps as JSON."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_rlkv.diagnostics.evictions import cached_keys, response_queries
from lit_rlkv.models.replay import prompt_columns
from lit_rlkv.types import NEVER, Rollout

MAX_PANELS = 4
"""Most layers, and most heads, whose key lifetimes are kept."""


def eviction_record(rollout: Rollout, label_of: Callable[[int], str] | None = None) -> dict[str, Any]:
    """Return the cache fill of a rollout and the key lifetimes of its longest sequence, in plain types.

    Args:
        label_of: returns the label of a token id.
    """
    row = int(rollout.attention_mask.sum(dim=1).argmax())  # it has the most evictions
    tokens = rollout.input_ids[row][rollout.attention_mask[row]].tolist()
    labels = None if label_of is None else [label_of(token) for token in tokens]
    return {"fill": fill_record(rollout), "lifetimes": lifetimes_record(rollout, row, labels)}


def fill_record(rollout: Rollout) -> dict[str, list[float | int]]:
    """Return the cached keys at each query over all sequences, layers and heads, and those of a dense cache.

    `position` counts queries from the column where the responses begin.
    """
    rollout = rollout.to("cpu")
    is_query = rollout.attention_mask & response_queries(rollout.attention_mask)
    is_shown = is_query.any(dim=0)
    response_start = int(rollout.response_mask.any(dim=0).int().argmax())

    def at_queries(counts: Tensor) -> np.ndarray:
        """Return counts as [sequence x layer x head, column], NaN where a sequence had no query."""
        values = counts.double().masked_fill(~is_query[:, None, None], torch.nan)
        return values.flatten(0, 2)[:, is_shown].numpy()

    n_layers = rollout.evicted_at.shape[1]
    cached = at_queries(torch.stack([cached_keys(rollout, layer) for layer in range(n_layers)], dim=1))
    dense = at_queries(rollout.attention_mask.cumsum(dim=1)[:, None, None])
    return {
        "position": (torch.arange(len(is_shown)) - response_start)[is_shown].tolist(),
        "cached_mean": np.nanmean(cached, axis=0).tolist(),
        "cached_low": np.nanmin(cached, axis=0).tolist(),
        "cached_high": np.nanmax(cached, axis=0).tolist(),
        "dense_mean": np.nanmean(dense, axis=0).tolist(),
    }


def lifetimes_record(rollout: Rollout, row: int, token_labels: Sequence[str] | None = None) -> dict[str, Any]:
    """Return when each key of one sequence was evicted, for at most MAX_PANELS layers and KV heads.

    Keys and queries are numbered from the first token of the sequence; None is a key that was kept. The last
    token is written but never read, and is no key.

    Args:
        token_labels: one label per token of the row, without padding.
    """
    attention_mask = rollout.attention_mask[row].cpu()
    n_tokens = int(attention_mask.sum())
    n_keys = max(n_tokens - 1, 0)
    first = int(attention_mask.int().argmax())
    evicted_at = rollout.evicted_at[row].cpu()[..., attention_mask][..., :n_keys]
    layers, heads = (_evenly_chosen(size) for size in evicted_at.shape[:2])
    return {
        "n_keys": n_keys,
        "n_prompt": int(prompt_columns(rollout)[row]) - first,
        "labels": None if token_labels is None else list(token_labels[:n_keys]),
        "layers": layers,
        "heads": heads,
        "evicted_at": [
            [
                [None if column == NEVER else column - first for column in evicted_at[layer, head].tolist()]
                for head in heads
            ]
            for layer in layers
        ],
    }


def _evenly_chosen(size: int) -> list[int]:
    """Return at most MAX_PANELS evenly spaced indices."""
    return sorted({round(index) for index in np.linspace(0, size - 1, min(size, MAX_PANELS))})
