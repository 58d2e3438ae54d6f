"""Paused rows: what decode steps overwrite of rows that wait, put aside until they go on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_rlkv.kvcache import SlotCache
from lit_rlkv.kvcache.state_layer import STATES
from lit_rlkv.kvcache.window_layer import WindowLayer

PausedRow = list[Tensor]
"""One row of each of `_overwritten`."""


def pause_rows(kv: SlotCache, newest: Tensor, rows: Sequence[int]) -> list[PausedRow]:
    """Return copies of what steps overwrite of these rows, row by row.

    Args:
        newest: last sampled token of each row, which no forward has read.
    """
    index = torch.tensor(rows, device=newest.device)
    return [list(parts) for parts in zip(*(each[index] for each in _overwritten(kv, newest)), strict=True)]


def resume_rows(kv: SlotCache, newest: Tensor, rows: Sequence[int], paused: Sequence[PausedRow]) -> None:
    """Write paused rows back in place."""
    index = torch.tensor(rows, device=newest.device)
    for each, parts in zip(_overwritten(kv, newest), zip(*paused, strict=True), strict=True):
        each[index] = torch.stack(parts)


def _overwritten(kv: SlotCache, newest: Tensor) -> list[Tensor]:
    """Return views [row, ...] of all that a step writes for a row that does not run.

    Such a row writes its key to its first slot, its query over its latest one, and its states anew. The ring
    of a window is returned whole, because the slot that is written differs from row to row.
    """
    found = [newest, kv.n_live.T]
    for layer in kv.slot_layers:
        is_ring = isinstance(layer, WindowLayer)
        pools = [part for pool in layer.pools or () for part in pool.parts]
        if kv.policy is not None and not is_ring:
            pools += [layer.columns, *([] if layer.attention is None else [layer.attention])]
        found += [pool if is_ring else pool[:, :, :1] for pool in pools]
        if layer.recent_queries is not None:
            found.append(layer.recent_queries.ring)
    for state_layer in kv.state_layers:
        found += [pool for name in STATES for pool in getattr(state_layer, name).values() if pool is not None]
    return found
