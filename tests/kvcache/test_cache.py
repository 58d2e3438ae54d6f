import gc
import itertools
import math
import weakref
from functools import cache

import pytest
import torch
from torch import Tensor

from lit_rlkv.kvcache import POLICIES, CacheSpec, SlotCache
from lit_rlkv.kvcache.policies import UNTRAINED
from lit_rlkv.types import NEVER
from tests.kvcache import published

LAYERS, KV_HEADS, GROUP, DIM = 2, 2, 2, 8
LENS = (13, 9, 8, 3)
EQUAL = (10, 10, 10, 10)
"""Prompts of one length above the budget, in a batch as wide as the ragged one."""
WIDTH, N_STEPS = max(LENS), 14
SPEC = {"budget": 8, "interval": 3, "sink": 1, "window": 3}
SCALING = DIM**-0.5
SOFTCAP = 1.0
"""Logits here have a standard deviation of 2, so it bends most of them."""
DETERMINISTIC = sorted(name for name in UNTRAINED if not POLICIES[name].draws)


def random_states(seed: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the whole sequences: [layer, batch, head, seq, dim]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, len(LENS), KV_HEADS, WIDTH + N_STEPS, DIM)
    query = 2 * torch.randn(LAYERS, len(LENS), KV_HEADS * GROUP, *shape[3:], generator=generator)
    return query, torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def make_cache(spec: CacheSpec, lens: tuple[int, ...] = LENS) -> SlotCache:
    device = torch.device("cpu")
    generator, frequencies = torch.Generator().manual_seed(0), torch.tensor([1.0, 0.1, 0.01])
    n_columns = WIDTH + N_STEPS
    return SlotCache(spec, LAYERS, len(lens), n_columns, device, generator, frequencies=frequencies)


def evictions(kv: SlotCache) -> Tensor:
    """Return the eviction table of all rows."""
    return kv.evicted_at(torch.arange(kv.n_rows))


def prompt_mask(lens: tuple[int, ...]) -> Tensor:
    return torch.arange(WIDTH) >= WIDTH - torch.tensor(lens)[:, None]


def run_cache(
    kv: SlotCache,
    states: tuple[Tensor, Tensor, Tensor],
    lens: tuple[int, ...] = LENS,
    rows: list[int] | None = None,
) -> Tensor:
    """Return the attention outputs of every column, [layer, row, head, seq, dim]."""
    rows = list(range(len(lens))) if rows is None else rows
    is_running = torch.zeros(len(lens), dtype=torch.bool)
    is_running[rows] = True
    query, key, value = (s[:, rows] for s in states)
    kv.begin(rows, prompt_mask(lens)[rows])
    with kv.feed(rows, prompt_mask(lens)[rows]):
        outs = [attend_all(kv, (query, key, value), slice(0, WIDTH))]
    for step in range(N_STEPS):
        kv.advance(is_running)
        outs.append(attend_all(kv, states, slice(WIDTH + step, WIDTH + step + 1))[:, rows])
        if kv.levels.step():
            kv.evict()
    return torch.cat(outs, dim=3)


def prefill_all(kv: SlotCache, softcap: float | None = None) -> None:
    kv.begin(range(len(LENS)), prompt_mask(LENS))
    with kv.feed(range(len(LENS)), prompt_mask(LENS)):
        attend_all(kv, random_states(), slice(0, WIDTH), softcap)


def attend_all(
    kv: SlotCache, states: tuple[Tensor, Tensor, Tensor], columns: slice, softcap: float | None = None
) -> Tensor:
    layers = zip(kv.slot_layers, *states, strict=True)
    return torch.stack(
        [layer.attend(*(s[:, :, columns] for s in qkv), SCALING, softcap) for layer, *qkv in layers]
    )


class SlowSequence:
    """One layer of one sequence, no batch and no padding: each KV head has a list of visible positions."""

    def __init__(self, policy: str, query: Tensor, key: Tensor, value: Tensor, prompt_len: int) -> None:
        self.policy, self.query, self.key, self.value = policy, query, key, value
        self.visible: list[list[int]] = [[] for _ in range(KV_HEADS)]
        self.attention_sum: list[dict[int, float]] = [{} for _ in range(KV_HEADS)]
        self.last_attention: list[dict[int, float]] = [{} for _ in range(KV_HEADS)]
        self.previous: list[dict[int, float]] = [{} for _ in range(KV_HEADS)]
        self.evicted_at = [[NEVER] * key.shape[1] for _ in range(KV_HEADS)]
        self.out = torch.zeros(KV_HEADS * GROUP, *key.shape[1:])
        for position in range(key.shape[1]):
            self.attend(position)
            n_decoded = position - prompt_len + 1
            if n_decoded >= 0 and n_decoded % SPEC["interval"] == 0 and len(self.visible[0]) > SPEC["budget"]:
                self.compact(position)

    def attend(self, position: int) -> None:
        for h in range(KV_HEADS):
            self.visible[h].append(position)
            self.attention_sum[h][position] = 0.0
            self.last_attention[h] = dict.fromkeys(self.visible[h], 0.0)
            for g in range(GROUP):
                head = h * GROUP + g
                logits = [
                    published.dot(self.query[head, position], self.key[h, k]) * SCALING
                    for k in self.visible[h]
                ]
                for k, prob in zip(self.visible[h], published.softmax(logits), strict=True):
                    self.attention_sum[h][k] += prob / GROUP
                    self.last_attention[h][k] += prob / GROUP
                    self.out[head, position] += prob * self.value[h, k]

    def compact(self, position: int) -> None:
        window = range(position + 1 - SPEC["window"], position + 1)
        heads = [self.describe(h, window) for h in range(KV_HEADS)]
        scores = published.scores_of_layer(self.policy, heads)
        for h in range(KV_HEADS):
            if self.policy == "gkv":
                self.previous[h] = dict(zip(self.visible[h], published.gkv_memory(heads[h]), strict=False))
            score = dict(zip(self.visible[h], scores[h], strict=False))
            protected = [k for k in self.visible[h] if k < SPEC["sink"] or k in window]
            others = sorted(set(self.visible[h]) - set(protected), key=lambda k: (-score[k], k))
            kept = sorted(protected + others[: SPEC["budget"] - len(protected)])
            for k in set(self.visible[h]) - set(kept):
                self.evicted_at[h][k] = position + 1
            self.visible[h] = kept

    def describe(self, h: int, window: range) -> published.Head:
        return published.Head(
            keys=[self.key[h, k] for k in self.visible[h]],
            values=[self.value[h, k] for k in self.visible[h]],
            positions=self.visible[h],
            queries=[[self.query[h * GROUP + g, w] for w in window] for g in range(GROUP)],
            query_positions=list(window),
            attention_sum=[self.attention_sum[h][k] for k in self.visible[h]],
            last_attention=[self.last_attention[h][k] for k in self.visible[h]],
            scaling=SCALING,
            n_first=SPEC["sink"],
            previous=[self.previous[h].get(k, 0.0) for k in self.visible[h]],
        )


@cache
def slow_table(policy: str, lens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Eviction table [batch, layer, kv_head, seq], 0 on padding; and outputs as of `run_cache`."""
    states = random_states()
    evicted_at = torch.zeros(len(LENS), LAYERS, KV_HEADS, WIDTH + N_STEPS, dtype=torch.int32)
    outs = torch.zeros(LAYERS, len(LENS), KV_HEADS * GROUP, WIDTH + N_STEPS, DIM)
    for row, prompt_len in enumerate(lens):
        pad = WIDTH - prompt_len
        for layer in range(LAYERS):
            sequence = SlowSequence(policy, *(s[layer, row, :, pad:] for s in states), prompt_len)
            times = torch.tensor(sequence.evicted_at)
            evicted_at[row, layer, :, pad:] = torch.where(times == NEVER, NEVER, times + pad).int()
            outs[layer, row, :, pad:] = sequence.out
    return evicted_at, outs


@pytest.mark.parametrize("lens", [LENS, EQUAL], ids=["ragged", "equal"])
@pytest.mark.parametrize("policy", DETERMINISTIC)
def test_evictions_and_outputs_match_a_slow_simulation(policy: str, lens: tuple[int, ...]):
    states = random_states()
    kv = make_cache(CacheSpec(policy=policy, **SPEC), lens)
    outs = run_cache(kv, states, lens)
    expected_evicted_at, expected_outs = slow_table(policy, lens)
    assert (expected_evicted_at[expected_evicted_at > 0] < NEVER).float().mean() > 0.3
    assert torch.equal(evictions(kv), expected_evicted_at)
    torch.testing.assert_close(outs, expected_outs, rtol=1e-4, atol=1e-5)


def test_the_simulation_tells_policies_apart():
    tables = [slow_table(policy, LENS)[0] for policy in DETERMINISTIC]
    assert not any(torch.equal(a, b) for i, a in enumerate(tables) for b in tables[:i])


def test_padding_is_evicted_at_0_and_a_long_prompt_evicts_at_its_end():
    kv = make_cache(CacheSpec(policy="streaming", **SPEC))
    prefill_all(kv)
    # Row 0: 13 tokens, budget 8: the sink 0 and the last seven (6..12) stay, 1..5 die at column 13.
    assert evictions(kv)[0, 0, 0, :13].tolist() == [NEVER] + [13] * 5 + [NEVER] * 7
    # Row 3: 3 tokens after ten columns of padding.
    assert evictions(kv)[3, 1, 1, :13].tolist() == [0] * 10 + [NEVER] * 3


def test_a_dense_cache_evicts_nothing_and_attends_to_everything():
    states = random_states()
    kv = make_cache(CacheSpec.dense())
    outs = run_cache(kv, states)
    query, key, value = (s[:, 0] for s in states)  # row 0 has no padding
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(outs[:, 0], expected)
    assert (evictions(kv)[0] == NEVER).all()


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "tova"])
def test_a_row_does_not_depend_on_the_rows_beside_it(policy: str):
    states = random_states()
    together = make_cache(CacheSpec(policy=policy, **SPEC))
    run_cache(together, states)
    alone = make_cache(CacheSpec(policy=policy, **SPEC), LENS[1:2])
    query, key, value = (s[:, 1:2] for s in states)
    run_cache(alone, (query, key, value), LENS[1:2])
    assert torch.equal(evictions(alone)[0], evictions(together)[1])


def received_by_prompt(policy: str, layer: int, row: int, kv_head: int, softcap: float | None) -> list[float]:
    """Return the attention that each prompt column received, by loops over queries and heads."""
    queries, keys, _ = (s[layer, row] for s in random_states())
    first = WIDTH - LENS[row]
    received = [0.0] * WIDTH
    for column in range(WIDTH - 1 if policy == "tova" else first, WIDTH):
        for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
            seen = range(first, column + 1)
            logits = [published.dot(queries[head, column], keys[kv_head, k]) * SCALING for k in seen]
            if softcap is not None:
                logits = [softcap * math.tanh(logit / softcap) for logit in logits]
            for k, prob in zip(seen, published.softmax(logits), strict=True):
                received[k] += prob / GROUP
    return received


@pytest.mark.parametrize("policy", ["h2o", "tova"])
@pytest.mark.parametrize("softcap", [None, SOFTCAP])
def test_attention_over_a_prompt_is_that_of_a_plain_loop(policy: str, softcap: float | None):
    kv = make_cache(CacheSpec(policy=policy, **SPEC))
    prefill_all(kv, softcap)
    other = SOFTCAP if softcap is None else None
    for layer, row, head in itertools.product(range(LAYERS), range(len(LENS)), range(KV_HEADS)):
        pool, n_live = kv.slot_layers[layer], int(kv.n_live[0, row])
        assert pool.attention is not None
        columns = pool.columns[row, head, :n_live]
        actual = pool.attention[row, head, :n_live]
        expected = torch.tensor(received_by_prompt(policy, layer, row, head, softcap))[columns]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
        wrong = torch.tensor(received_by_prompt(policy, layer, row, head, other))[columns]
        assert (actual - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("policy", [*DETERMINISTIC, "dense"])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3]], ids=["all rows", "some rows"])
def test_rows_that_are_used_again_remember_nothing(policy: str, rows: list[int]):
    spec = CacheSpec.dense() if policy == "dense" else CacheSpec(policy=policy, **SPEC)
    lens = LENS[::-1]  # long prompts follow short ones, and short ones long
    used, fresh = make_cache(spec), make_cache(spec)
    first_outs = run_cache(used, random_states(5))
    first_evicted_at = evictions(used)
    used.levels.stop(range(len(LENS)))
    outs = run_cache(used, random_states(6), lens, rows)
    expected = run_cache(fresh, random_states(6), lens)[:, rows]
    assert not torch.allclose(outs, first_outs[:, rows], atol=1e-2)
    torch.testing.assert_close(outs, expected)
    assert torch.equal(used.evicted_at(torch.tensor(rows)), fresh.evicted_at(torch.tensor(rows)))
    others = torch.tensor([row for row in range(len(LENS)) if row not in rows], dtype=torch.long)
    assert torch.equal(used.evicted_at(others), first_evicted_at[others])


@pytest.mark.parametrize("policy", ["h2o", "tova"])
def test_prompt_attention_does_not_depend_on_chunks(policy: str, monkeypatch: pytest.MonkeyPatch):
    whole, chunked = (
        make_cache(CacheSpec(policy=policy, **SPEC)),
        make_cache(CacheSpec(policy=policy, **SPEC)),
    )
    run_cache(whole, random_states())
    # Four heads of four rows, 13 columns: four queries at a time.
    monkeypatch.setattr("lit_rlkv.kvcache.feed_attention.MAX_LOGITS", 4 * 4 * 4 * WIDTH)
    run_cache(chunked, random_states())
    assert torch.equal(evictions(chunked), evictions(whole))


def test_a_layer_that_attends_twice_in_one_forward_is_refused():
    kv = make_cache(CacheSpec.dense())
    kv.begin(range(len(LENS)), prompt_mask(LENS))
    with kv.feed(range(len(LENS)), prompt_mask(LENS)):
        attend_all(kv, random_states(), slice(0, WIDTH))
        with pytest.raises(ValueError, match="attends twice in one forward"):
            attend_all(kv, random_states(), slice(0, WIDTH))


def test_decoding_from_an_empty_cache_is_refused():
    with pytest.raises(ValueError, match="the cache is empty"):
        attend_all(make_cache(CacheSpec.dense()), random_states(), slice(0, 1))


def test_the_pools_are_freed_with_the_cache_not_at_the_next_garbage_collection():
    kv = make_cache(CacheSpec(policy="snapkv", **SPEC))
    prefill_all(kv)
    pool = weakref.ref(kv.slot_layers[0].pools[0].parts[0])
    gc.disable()
    try:
        del kv
        assert pool() is None
    finally:
        gc.enable()


def test_under_autocast_the_cache_holds_what_the_learner_attends_to():
    query, key, value = (s[0, :, :, :WIDTH] for s in random_states())
    kv = make_cache(CacheSpec(policy="snapkv", **SPEC))
    kv.begin(range(len(LENS)), prompt_mask(LENS))
    with kv.feed(range(len(LENS)), prompt_mask(LENS)), torch.autocast("cpu", torch.bfloat16):
        for layer in kv.slot_layers:
            out = layer.attend(query, key, value, SCALING)
    assert layer.pools is not None
    assert layer.recent_queries is not None
    dtypes = {out.dtype, *(pool.parts[0].dtype for pool in layer.pools), layer.recent_queries.dtype}
    assert dtypes == {torch.bfloat16}
