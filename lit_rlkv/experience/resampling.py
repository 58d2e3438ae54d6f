"""Dynamic sampling (arXiv:2503.14476): groups of equal rewards give way to groups of new prompts."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.group_baselines import is_informative
from lit_rlkv.experience.sample import widened
from lit_rlkv.types import Rewards, Rollout


def has_equal_groups(experience: Experience) -> bool:
    """True if the rewards of some group, on any rank, are all equal."""
    n_equal = (~_is_informative(experience)).sum()
    return bool(experience.ranks.all_reduce_sum(n_equal) > 0)


def replace_equal_groups(
    first: Experience, more: Experience, pad_token_id: int, n_shards: int = 1
) -> Experience:
    """Return `first` with groups of `more` in place of those with equal rewards, as far as these suffice.

    Each shard takes groups of its own alone, so that the result is the same on any number of ranks. Responses
    begin in the same column again, and all ranks have equally many columns. Weights stay those of `first`.

    Args:
        n_shards: equal parts of the groups of this rank.
    """
    starts = [int(each.rollout.response_mask.any(dim=0).int().argmax()) for each in (first, more)]
    ends = [
        each.rollout.input_ids.shape[1] - start for each, start in zip((first, more), starts, strict=True)
    ]
    n_columns = max(starts) + max(ends)
    parts = [
        _aligned(each, max(starts) - start, n_columns, pad_token_id)
        for each, start in zip((first, more), starts, strict=True)
    ]
    groups = _chosen_groups(*(_is_informative(each).view(n_shards, -1) for each in (first, more)))
    member = torch.arange(first.group_size, device=groups.device)
    rows = (groups[:, None] * first.group_size + member).flatten()
    values = {f.name: [getattr(part, f.name) for part in parts] for f in fields(Experience)}
    return replace(first, **{name: _rows_of(both, rows) for name, both in values.items()})


def _is_informative(experience: Experience) -> Bool[Tensor, " prompt"]:
    return is_informative(experience.rewards.total.view(-1, experience.group_size))


def _chosen_groups(
    is_kept: Bool[Tensor, "shard prompt"], is_useful: Bool[Tensor, "shard more"]
) -> Int[Tensor, " group"]:
    """Return the groups of the new batch, those of the second part numbered after the first."""
    groups = torch.arange(is_kept.numel(), device=is_kept.device).view_as(is_kept)
    given = torch.arange(is_useful.numel(), device=is_kept.device).view_as(is_useful) + is_kept.numel()
    for own, places, more, donors in zip(groups, ~is_kept, given, is_useful, strict=True):
        n = min(int(places.sum()), int(donors.sum()))
        own[places.nonzero().flatten()[:n]] = more[donors][:n]
    return groups.flatten()


def _aligned(experience: Experience, n_left: int, n_columns: int, pad_token_id: int) -> Experience:
    """Return an experience with so many more columns before its first one, and `n_columns` in all."""
    n_right = n_columns - n_left - experience.rollout.input_ids.shape[1]

    def changed(value: Any) -> Any:
        if isinstance(value, Rollout):
            return widened(value, n_columns, pad_token_id, n_left)
        is_table = isinstance(value, Tensor) and value.ndim == 2
        return F.pad(value, (n_left, n_right)) if is_table else value

    return experience.map_parts(changed)


def _rows_of(both: Sequence[Any], rows: Int[Tensor, " row"]) -> Any:
    """Return rows of two values of a field, the second one's after the first one's."""
    first, more = both
    if isinstance(first, Rollout):
        return replace(Rollout.cat(both).rows(rows), kv_bytes=max(first.kv_bytes, more.kv_bytes))
    if isinstance(first, Rewards):
        return _joined_rewards(first, more).rows(rows)
    if isinstance(first, Tensor):
        return torch.cat([first, more])[rows]
    if isinstance(first, list | tuple) and first:
        texts = [*first, *more]
        return [texts[row] for row in rows.tolist()]
    return first


def _joined_rewards(first: Rewards, more: Rewards) -> Rewards:
    failed = [
        torch.zeros_like(each.total, dtype=torch.bool) if each.is_failed is None else each.is_failed
        for each in (first, more)
    ]
    return Rewards(
        total=torch.cat([first.total, more.total]),
        components={
            name: torch.cat([first.components[name], more.components[name]]) for name in first.components
        },
        is_failed=None if first.is_failed is None and more.is_failed is None else torch.cat(failed),
        weighted=torch.cat([first.scores, more.scores]),
        weights=first.weights,
    )
