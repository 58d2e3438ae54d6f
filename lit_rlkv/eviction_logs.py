"""Eviction times from what other engines log: positions kept at compactions, overwritten slots, or a rule.

All times are those of `LogRow.evicted_at`: the position of the first query that no longer sees the key.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lit_rlkv.kernels.evict import choose_survivors
from lit_rlkv.kvcache.seeded_draws import seeded_draws
from lit_rlkv.log_row import is_whole_numbers
from lit_rlkv.types import NEVER

Times = Int[Tensor, "*lead token"]


def from_kept(n_tokens: int, compactions: Sequence[tuple[int, Tensor]], *, ordinals: bool = False) -> Times:
    """Return the times from the keys that each compaction kept.

    Args:
        n_tokens: tokens of the sequence.
        compactions: in order, at least one: the position of the first query that no longer sees the other
            keys, and the keys that stay, [*lead, kept] in any order, -1 where a head keeps fewer. `lead` is
            layers and KV heads, for example.
        ordinals: kept keys are not positions but places in the cache at that time, which has the keys of the
            last compaction, in its order, and those since.

    Raises:
        ValueError: a key is kept twice, after it was evicted or before it was written, or compactions are out
            of order or of different layers or heads.
    """
    lead, before, position = compactions[0][1].shape[:-1], 0, torch.arange(n_tokens)
    times = torch.full((*lead, n_tokens), NEVER, dtype=torch.int32)
    cached = torch.empty((*lead, 0), dtype=torch.long)
    for now, given in compactions:
        kept, at = _whole(given), f"compaction at {now}: key {{}} is kept"
        if not before < now <= n_tokens or kept.shape[:-1] != lead:
            raise ValueError(
                f"compactions must be at rising positions up to {n_tokens} and of {[*lead]} layers and heads"
                f", got {[*kept.shape[:-1]]} at {now} after one at {before}"
            )
        if ordinals:
            cached = torch.cat([cached, torch.arange(before, now).expand(*lead, -1)], dim=-1)
            cached = cached.gather(-1, (cached < 0).int().argsort(dim=-1, stable=True))  # -1 to the end
            _refuse(kept >= (cached >= 0).sum(-1, keepdim=True), kept, f"{at}, and the cache has fewer")
            kept = cached = cached.gather(-1, kept.clamp(min=0)).where(kept >= 0, -1)
        _refuse(kept >= now, kept, f"{at} before it was written")
        places, none = kept.where(kept >= 0, n_tokens), torch.zeros((*lead, n_tokens + 1), dtype=torch.long)
        n_kept = none.scatter_add_(-1, places, torch.ones_like(places))[..., :n_tokens]
        _refuse(n_kept > 1, position.expand_as(times), f"{at} twice")
        _refuse((n_kept > 0) & (times <= now), position.expand_as(times), f"{at} after it was evicted")
        times[(position < now) & (n_kept == 0) & (times == NEVER)] = now
        before = now
    return times


def from_slots(
    n_tokens: int,
    slots: Int[Tensor, "*lead new"],
    *,
    cache_length: int,
    chunks: Sequence[int] | None = None,
    grace_period: int = 0,
) -> Times:
    """Return the times from the slot of a full cache that each token took.

    No query of the forward in which a key is overwritten sees it.

    Args:
        slots: of the tokens from number `cache_length` on; those before it fill the slots in order.
        chunks: number of tokens of each forward; None: the first `cache_length`, then one at a time.
        grace_period: last slots, a ring of the latest keys; a slot is then taken by the key that leaves it.

    Raises:
        ValueError: a slot is none of the cache or taken twice in one forward, or numbers of tokens differ.
    """
    slots, n_slots, n_new = _whole(slots), cache_length - grace_period, slots.shape[-1]
    chunks = [cache_length] + [1] * n_new if chunks is None else chunks
    ends, n_fed = torch.tensor(chunks).cumsum(0).tolist(), cache_length + n_new
    if ends[-1] != n_fed or n_tokens - n_fed not in (0, 1) or cache_length not in ends:
        raise ValueError(
            f"chunks and slots must be of the {n_tokens} tokens or all but the last, and a chunk must end as "
            f"the cache is full, got chunks {chunks} and {cache_length} + {n_new} tokens by slots"
        )
    _refuse((slots < 0) | (slots >= n_slots), slots, f"slot {{}} is none of 0 to {n_slots - 1}")
    times = torch.full((*slots.shape[:-1], n_tokens), NEVER, dtype=torch.int32)
    holds = torch.arange(n_slots).repeat(*slots.shape[:-1], 1)
    for start, end in pairwise(ends[ends.index(cache_length) :]):
        taken = slots[..., start - cache_length : end - cache_length]
        ordered = taken.sort(dim=-1).values
        _refuse(ordered.diff() == 0, ordered, f"slot {{}} is taken twice by tokens {start} to {end - 1}")
        times.scatter_(-1, holds.gather(-1, taken), start)
        holds.scatter_(-1, taken, torch.arange(start, end).expand_as(taken) - grace_period)
    return times


def from_rule(
    n_tokens: int, *, last: int, sink: int = 0, compactions: Iterable[int] | None = None
) -> Int[Tensor, "1 1 token"]:
    """Return the times of a cache that keeps the `sink` first and the `last` latest keys, in all heads.

    The record of the policy `streaming` is that of `last = budget - sink` with compactions at
    `range(n_prompt, n_tokens - 1, interval)`.

    Args:
        compactions: positions of the first query after each compaction, which keeps the `last` keys before
            that query; None: each query sees `last` keys, its own among them.
    """
    position = torch.arange(n_tokens)
    times = position + last
    if compactions is not None:
        moments = torch.tensor([*sorted(compactions), NEVER])
        times = moments[torch.searchsorted(moments, times + 1)]
    return times.masked_fill((position < sink) | (times >= n_tokens), NEVER).int()[None, None]


def from_seed(
    n_tokens: int,
    seed: int,
    *,
    n_layers: int,
    n_kv_heads: int,
    budget: int,
    compactions: Iterable[int],
    sink: int = 0,
    window: int = 1,
) -> Int[Tensor, "layer kv_head token"]:
    """Return the times of the policy `random` with `cache.policy_options.seed`.

    Where a sliding window is shorter than the row, it alone evicts: put `NEVER` in such layers.

    Args:
        n_layers: layers with attention.
        budget: keys of each layer; with `cache.protect_prompt` those of the prompt as well.
        compactions: positions of the first query after each compaction, `range(n_prompt, n_tokens - 1,
            interval)`; with `rollout.prefill_chunk` also `range(n_prompt, 0, -prefill_chunk)`.
        sink, window: first and latest keys, which stay; with `cache.protect_prompt` the prompt is first.
    """
    position = torch.arange(n_tokens).expand(n_layers, n_kv_heads, -1)
    times = torch.full(position.shape, NEVER, dtype=torch.int32)
    layers, first = torch.arange(n_layers)[:, None, None], torch.zeros(n_layers, dtype=torch.long)
    for moment in sorted(compactions):
        now = torch.full_like(first, moment)
        held = position.where((position < moment) & (times == NEVER), -1)
        draws = seeded_draws(seed, layers, position, now)
        _, is_kept = choose_survivors(draws, held, now, first, budget=budget, sink=sink, window=window)
        times[(held >= 0) & ~is_kept] = moment
    return times


def _whole(values: Tensor) -> Int[Tensor, "*lead place"]:
    if not is_whole_numbers(values):
        raise ValueError(f"kept keys and slots must be whole numbers, got {values.dtype}")
    return values.long().cpu()


def _refuse(is_wrong: Bool[Tensor, "*lead place"], values: Tensor, message: str) -> None:
    """Raise a ValueError with the first value that is wrong, and its layer and head."""
    if is_wrong.any():
        *lead, place = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{message.format(int(values[(*lead, place)]))}, at {lead} of {[*values.shape[:-1]]}"
        )
