"""Packing: cut rows into passes of at most so many tokens, each without the padding of longer rows."""

from collections.abc import Iterator
from itertools import pairwise
from typing import TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lit_rlkv.types import Rollout, TensorBatch

TOKENS_PER_PASS = 16_384
"""Default of the most tokens in a pass; larger ones are hardly faster."""

_Batch = TypeVar("_Batch", bound=TensorBatch)


def cut_into_passes(
    n_tokens: Int[Tensor, " unit"], tokens_per_pass: int, *, rows_per_unit: int = 1, n_passes: int = 1
) -> list[Tensor]:
    """Return the units of each pass, in their order: the longest ones in the first pass, and so on.

    A pass has rows × longest row ≤ `tokens_per_pass`, or a single unit.

    Args:
        n_tokens: tokens of the longest row of each unit.
        rows_per_unit: rows that stay together; 2 for pairs.
        n_passes: cut into at least so many passes, if there are enough units.
    """
    order = n_tokens.argsort(descending=True, stable=True)
    longest = n_tokens[order].tolist()
    cuts = [0]
    while cuts[-1] < len(longest):
        n_units = tokens_per_pass // (longest[cuts[-1]] * rows_per_unit)
        cuts.append(min(cuts[-1] + max(n_units, 1), len(longest)))
    while len(cuts) <= min(n_passes, len(longest)):
        sizes = [end - begin for begin, end in pairwise(cuts)]
        widest = max(range(len(sizes)), key=sizes.__getitem__)
        cuts.insert(widest + 1, cuts[widest] + sizes[widest] // 2)
    return [order[begin:end].sort().values for begin, end in pairwise(cuts)]


def packed(
    batch: _Batch, attention_mask: Bool[Tensor, "batch seq"], rows: Int[Tensor, " row"] | slice
) -> _Batch:
    """Return rows that all start at column 0, with as many columns as the longest has tokens.

    The last dimension of every tensor of the batch must be the columns of `attention_mask`.
    """
    return batch.select(rows, _columns(attention_mask[rows]))


def unpacked(
    values: Tensor, attention_mask: Bool[Tensor, "batch seq"], rows: Int[Tensor, " row"] | slice
) -> Tensor:
    """Return values [row, column] of packed rows in the columns that they came from; 0 elsewhere."""
    mask = attention_mask[rows]
    return values.new_zeros(mask.shape).scatter(1, _columns(mask), values)


def passes(rollout: Rollout, tokens_per_pass: int) -> Iterator[tuple[Tensor, Rollout]]:
    """Yield the rows of each pass, and the rollout of these rows, packed."""
    for rows in cut_into_passes(rollout.attention_mask.sum(dim=1), tokens_per_pass):
        yield rows, packed(rollout, rollout.attention_mask, rows)


def _columns(attention_mask: Bool[Tensor, "row seq"]) -> Int[Tensor, "row column"]:
    """Return the old column of each new one: from the first token on, and around the end into padding."""
    n_columns = attention_mask.shape[1]
    starts = attention_mask.int().argmax(dim=1)
    width = int(attention_mask.sum(dim=1).max())
    return (starts[:, None] + torch.arange(width, device=starts.device)) % n_columns
