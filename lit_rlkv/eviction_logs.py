"""Eviction times from what other engines log: kept positions, overwritten slots, a rule or a seed.

All times are those of `LogRow.evicted_at`: the position of the first query that no longer sees the key.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lit_rlkv.checks import Range
from lit_rlkv.kernels.evict import choose_survivors
from lit_rlkv.kvcache.policies import Random
from lit_rlkv.kvcache.seeded_draws import seeded_draws
from lit_rlkv.kvcache.spec import CacheSpec
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

    Raises:
        ValueError: `last` or `sink` is no number of keys.
    """
    Range(least=1).check("last", last, int)
    Range(least=0).check("sink", sink, int)
    position = torch.arange(n_tokens)
    times = position + last
    if compactions is not None:
        moments = torch.tensor([*sorted(compactions), NEVER])
        times = moments[torch.searchsorted(moments, times + 1)]
    return times.masked_fill((position < sink) | (times >= n_tokens), NEVER).int()[None, None]


def from_seed(
    n_tokens: int,
    n_prompt: int,
    cache: CacheSpec,
    *,
    n_layers: int,
    n_kv_heads: int,
    windows: Mapping[int, int] = MappingProxyType({}),
    prefill_chunk: int | None = None,
) -> Int[Tensor, "layer kv_head token"]:
    """Return the times of a row of `generate` under the policy `random` with `cache.policy_options.seed`.

    All rows of the same lengths lose the same keys.

    Args:
        n_prompt: tokens of the row that were given, of `n_tokens`.
        n_layers: layers with attention.
        windows: sliding windows by the number of the layer, from 0; there the window alone evicts.
        prefill_chunk: that of the rollout.

    Raises:
        ValueError: the cache is not `random` with a seed, or the row has no prompt.
    """
    Range(least=1, most=n_tokens).check("n_prompt", n_prompt, int)
    policy = cache.make_policy()
    if not isinstance(policy, Random) or policy.seed is None:
        raise ValueError(
            f"cache must be random with a seed, got {cache.label}; give "
            'CacheSpec("random", ..., policy_options={"seed": 0}), or a row of another cache its own times'
        )
    limits = {"sink": cache.sink, "window": cache.window, "prompt_end": n_prompt * cache.protect_prompt}
    chunks = range(n_prompt, 0, -(prefill_chunk or n_prompt))[:0:-1]
    moments = [*chunks, *range(n_prompt, n_tokens - 1, cache.interval)]
    times = torch.full((n_layers, n_kv_heads, n_tokens), NEVER, dtype=torch.int32)
    for layer, window in windows.items():
        times[layer, :, :-1] = from_rule(n_tokens - 1, last=window)[0]  # the last token is no query
    layers = [layer for layer in range(n_layers) if layer not in windows]
    for layer, budget in zip(layers, cache.layer_budgets(len(layers)), strict=True):
        held, start, first = torch.empty((1, n_kv_heads, 0), dtype=torch.long), 0, torch.zeros(1).long()
        for moment in moments:
            new, now = torch.arange(start, moment).expand(1, n_kv_heads, -1), torch.tensor([moment])
            held, start = torch.cat([held, new], dim=-1), moment
            if held.shape[-1] > budget + limits["prompt_end"]:
                draws = seeded_draws(policy.seed, layer, held, now)
                kept, is_kept = choose_survivors(draws, held, now, first, budget=budget, **limits)
                times[layer].scatter_(-1, held[0], torch.where(is_kept[0], NEVER, moment).int())
                held = held.gather(-1, kept)
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
