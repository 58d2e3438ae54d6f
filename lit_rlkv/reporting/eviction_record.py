"""Record of a rollout's evictions for the figures: plain numbers that a run folder keeps as JSON."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lit_rlkv.models.replay import prompt_columns
from lit_rlkv.types import NEVER, Rollout

MAX_PANELS = 4
"""Most layers, and most heads, whose key lifetimes are kept."""


def eviction_record(rollout: Rollout, label_of: Callable[[int], str] | None = None) -> dict[str, Any]:
    """Return the key lifetimes of the longest sequence of a rollout, in plain types.

    Args:
        label_of: returns the label of a token id.
    """
    row = int(rollout.attention_mask.sum(dim=1).argmax())  # it has the most evictions
    tokens = rollout.input_ids[row][rollout.attention_mask[row]].tolist()
    labels = None if label_of is None else [label_of(token) for token in tokens]
    return {"lifetimes": lifetimes_record(rollout, row, labels)}


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
    evicted_at = rollout.rows(slice(row, row + 1)).evicted_at[0].cpu()[..., attention_mask][..., :n_keys]
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
