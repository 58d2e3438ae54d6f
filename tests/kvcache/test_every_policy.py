"""Tests of every policy in POLICIES."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from lit_rlkv.kvcache import POLICIES, CacheSpec, SlotCache
from lit_rlkv.kvcache.policy import Policy, SlotView
from lit_rlkv.kvcache.scorer import KVScorer, KVShape

KV_HEADS, GROUP, DIM = 2, 2, 8
SCALING = DIM**-0.5
SPEC = {"budget": 8, "interval": 3, "sink": 2, "window": 3}
LENS = (13, 10, 8, 4, 1)
N_STEPS = 17
FREQUENCIES = torch.tensor([1.0, 0.1, 0.01])


class Watched(Policy):
    """A policy whose views and scores are kept for the test to read."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tracks_attention = policy.tracks_attention  # type: ignore[misc]
        self.sees_queries = policy.sees_queries  # type: ignore[misc]
        self.reads_rope = policy.reads_rope  # type: ignore[misc]
        self.renew = policy.renew  # type: ignore[method-assign]
        self.seen: list[tuple[SlotView, Tensor]] = []

    def score(self, view: SlotView) -> Tensor:
        scores = self.policy.score(view)
        # A view is of the pool itself, which the compaction changes.
        self.seen.append((replace(view, columns=view.columns.clone()), scores.clone()))
        return scores


class Indifferent(Policy):
    tracks_attention = None
    sees_queries = False

    def score(self, view: SlotView) -> Tensor:
        return torch.zeros(view.columns.shape)


class Journal:
    """One layer driven through prefill and decoding; after each step, what every head holds."""

    def __init__(self, policy: Policy | str) -> None:
        generator = torch.Generator().manual_seed(11)
        width = max(LENS)
        is_prompt = torch.arange(width) >= width - torch.tensor(LENS)[:, None]
        name = policy if isinstance(policy, str) else "streaming"
        spec, n_rows = CacheSpec(policy=name, **SPEC), len(LENS)
        scorer = KVScorer([KVShape(KV_HEADS, DIM, DIM)], hidden=4).requires_grad_(False)
        torch.nn.init.normal_(scorer.layer(0).out)
        cache = SlotCache(
            spec,
            1,
            n_rows,
            width + N_STEPS,
            torch.device("cpu"),
            generator,
            scorer=scorer,
            frequencies=FREQUENCIES,
        )
        assert cache.policy is not None
        self.policy = Watched(cache.policy if isinstance(policy, str) else policy)
        cache.policy = self.policy
        self.layer, self.cache = cache.slot_layers[0], cache
        self.held: list[list[list[int]]] = []
        self.compactions: list[tuple[Tensor, Tensor]] = []
        cache.begin(range(n_rows), is_prompt)
        with cache.feed(range(n_rows), is_prompt):
            self.attend(width, generator)
        self.record(torch.tensor(LENS) > SPEC["budget"])
        for _ in range(N_STEPS):
            cache.advance()
            self.attend(1, generator)
            is_due = cache.is_due[0]
            if cache.levels.step():
                cache.evict()
            self.record(is_due)

    def attend(self, n_columns: int, generator: torch.Generator) -> None:
        batch = len(LENS)
        query = torch.randn(batch, KV_HEADS * GROUP, n_columns, DIM, generator=generator)
        key = torch.randn(batch, KV_HEADS, n_columns, DIM, generator=generator)
        value = torch.randn(batch, KV_HEADS, n_columns, DIM, generator=generator)
        self.layer.attend(query, key, value, SCALING)

    def record(self, is_due: Tensor) -> None:
        n_live = self.cache.n_live[0].tolist()
        self.held.append([row[:n].tolist() for row, n in zip(self.layer.columns[:, 0], n_live, strict=True)])
        due = is_due.nonzero().flatten()
        if len(due) > 0:
            self.compactions.append((due, self.layer.columns[due][:, :, : SPEC["budget"]].clone()))


@cache
def journal_of(name: str) -> Journal:
    return Journal(name)


@pytest.mark.parametrize("name", POLICIES)
def test_a_compaction_keeps_sinks_window_and_the_top_scored(name: str):
    journal = journal_of(name)
    assert len(journal.compactions) == len(journal.policy.seen) >= 5
    for (due, kept), (view, scores) in zip(journal.compactions, journal.policy.seen, strict=True):
        assert view.is_due is not None
        assert view.is_due.nonzero().flatten().tolist() == due.tolist()
        for i, row in enumerate(due.tolist()):
            for h in range(KV_HEADS):
                first = max(LENS) - LENS[row]
                columns = view.columns[row, h].tolist()
                score = dict(zip(columns, scores[row, h].tolist(), strict=True))
                real = [c for c in columns if c >= first]
                last = max(columns)
                protected = [c for c in real if c < first + SPEC["sink"] or c > last - SPEC["window"]]
                others = sorted(set(real) - set(protected), key=lambda c: (-score[c], c))
                expected = sorted(protected + others[: SPEC["budget"] - len(protected)])
                assert kept[i, h].tolist() == expected


@pytest.mark.parametrize("name", POLICIES)
def test_no_head_ever_holds_more_than_budget_and_interval_keys_nor_padding(name: str):
    journal = journal_of(name)
    n_slots = SPEC["budget"] + SPEC["interval"]
    assert journal.layer.pools is not None
    assert journal.layer.pools[0].shape[2] == n_slots
    for held in journal.held:
        for row, columns in enumerate(held):
            assert len(columns) < n_slots
            assert min(columns) >= max(LENS) - LENS[row]
            assert columns == sorted(set(columns))


@pytest.mark.parametrize("name", POLICIES)
def test_the_eviction_table_tells_what_each_head_still_holds(name: str):
    journal = journal_of(name)
    next_query = max(LENS) + N_STEPS
    is_held = journal.layer.table(slice(None))[:, 0, :next_query] > next_query
    for row, columns in enumerate(journal.held[-1]):
        assert is_held[row].nonzero().flatten().tolist() == columns


def test_equal_scores_keep_the_earliest_keys():
    journal = Journal(Indifferent())
    # Row 0: the prompt is columns 0..12; sinks 0, 1; window 10, 11, 12; the other three places go to 2, 3, 4.
    assert journal.held[0][0] == [0, 1, 2, 3, 4, 10, 11, 12]
    # Three tokens later (13, 14, 15) all eleven slots are full again; the window is 13, 14, 15.
    assert journal.held[3][0] == [0, 1, 2, 3, 4, 13, 14, 15]
