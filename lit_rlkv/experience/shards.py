"""Rollouts side by side: parts of a batch that were sampled apart, and the batch of all ranks."""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_rlkv.distributed.ranks import Ranks
from lit_rlkv.types import Rollout


def joined(rollouts: Sequence[Rollout], n_columns: int, pad_token_id: int) -> Rollout:
    """The rows of all, in a common number of columns; the cache's bytes are the most of any."""
    wide = [widened(rollout, n_columns, pad_token_id) for rollout in rollouts]
    if len(wide) == 1:
        return wide[0]
    names = [field.name for field in fields(Rollout) if isinstance(getattr(wide[0], field.name), Tensor)]
    rows = {name: torch.cat([getattr(rollout, name) for rollout in wide]) for name in names}
    return replace(wide[0], **rows, kv_bytes=max(rollout.kv_bytes for rollout in wide))


def widened(rollout: Rollout, n_columns: int, pad_token_id: int) -> Rollout:
    """The rollout with padding on its right, up to `n_columns`."""
    n_more = n_columns - rollout.input_ids.shape[1]
    if n_more == 0:
        return rollout
    return replace(
        rollout,
        input_ids=F.pad(rollout.input_ids, (0, n_more), value=pad_token_id),
        attention_mask=F.pad(rollout.attention_mask, (0, n_more)),
        response_mask=F.pad(rollout.response_mask, (0, n_more)),
        rollout_logps=F.pad(rollout.rollout_logps, (0, n_more)),
        evicted_at=F.pad(rollout.evicted_at, (0, n_more)),
    )


def of_all_ranks(rollout: Rollout, ranks: Ranks) -> Rollout:
    """The rows of every rank, without their eviction tables, which only a learner of the rows needs.

    A eviction table is as large as layers × heads of all else together. `kv_bytes` are those of all caches.
    """
    light = replace(rollout, evicted_at=rollout.evicted_at[:, :0, :0])
    return replace(light.map_tensors(ranks.gather), kv_bytes=sum(ranks.gather_list([rollout.kv_bytes])))
