"""A row that has ended costs next to nothing in decode attention, and changes nothing of the rollout."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.decode_attention import decode_attention
from lit_rlkv.kvcache import POLICIES, SlotCache
from lit_rlkv.types import Rollout
from tests.models_zoo import LAYERS
from tests.rollout.recorded import RecordedRunner
from tests.rollout.test_decoder import LENS, run, stops
from tests.rollouts import same
from tests.tiers import short_tier

CASES = short_tier([*POLICIES, "dense"], ["h2o", "snapkv", "random", "dense"])


def keep_all(cache: SlotCache, is_running: Tensor) -> None:
    """`SlotCache.advance` of a cache whose ended rows hold their keys."""
    cache.n_live += is_running
    cache.column += is_running


class SlotsRead:
    """Slots that decode attention reads of each row in each step: [step, row]."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[Tensor] = []
        patch.setattr("lit_rlkv.kvcache.layer.decode_attention", self.attend)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, n_live: Tensor, *a: Any, **k: Any
    ) -> Tensor:
        self.calls.append(n_live.clone())
        return decode_attention(query, keys, values, n_live, *a, **k)

    def by_step(self) -> Tensor:
        return torch.stack(self.calls[::LAYERS])


def read_by(
    patch: pytest.MonkeyPatch, policy: str, *, keeps_all: bool = False, **settings: Any
) -> tuple[Rollout, Tensor]:
    with patch.context() as patched:
        if keeps_all:
            patched.setattr(SlotCache, "advance", keep_all)
        slots = SlotsRead(patched)
        return run(policy, **settings), slots.by_step()


@pytest.mark.parametrize("policy", CASES)
@pytest.mark.parametrize("max_rows", [None, 2])
def test_the_rollout_is_the_same_bit_for_bit_and_reads_fewer_slots(
    policy: str, max_rows: int | None, monkeypatch: pytest.MonkeyPatch
):
    settings = {"max_rows": max_rows, "eos_token_id": stops(run(policy))}
    rollout, slots = read_by(monkeypatch, policy, **settings)
    kept, kept_slots = read_by(monkeypatch, policy, keeps_all=True, **settings)
    assert same(rollout, kept)
    assert len(rollout.response_mask.sum(dim=1).unique()) >= 3
    if max_rows is None:
        assert slots.sum() < 0.8 * kept_slots.sum()


@pytest.mark.parametrize("policy", ["snapkv", "dense"])
def test_a_row_reads_one_slot_from_the_step_after_its_last_token(
    policy: str, monkeypatch: pytest.MonkeyPatch
):
    rollout, slots = read_by(monkeypatch, policy, eos_token_id=stops(run(policy)))
    # The first token comes from prefill; the step that samples token i reads the keys before it.
    n_steps = rollout.response_mask.sum(dim=1) - 1
    assert n_steps.min() < n_steps.max() == len(slots)
    is_over = torch.arange(len(slots))[:, None] >= n_steps
    assert (slots[is_over] == 1).all()
    assert (slots[~is_over] > 1).all()
    if policy == "dense":
        step = torch.arange(len(slots))[:, None]
        assert torch.equal(slots[~is_over], (torch.tensor(LENS) + step + 1)[~is_over])


def test_a_replayed_step_reads_one_slot_of_an_ended_row_without_the_host(monkeypatch: pytest.MonkeyPatch):
    settings = {"eos_token_id": stops(run("snapkv"))}
    monkeypatch.setattr("lit_rlkv.rollout.decoder.CudaGraphRunner", RecordedRunner)
    counts: list[list[int]] = []
    evict, n_replays = SlotCache.evict, RecordedRunner.n_replays

    def watched(cache: SlotCache) -> None:
        counts.append(cache.n_live[0].tolist())
        evict(cache)

    monkeypatch.setattr(SlotCache, "evict", watched)
    rollout = run("snapkv", **settings)
    n_tokens = rollout.response_mask.sum(dim=1)
    assert RecordedRunner.n_replays > n_replays + 5
    assert counts[-1][int(n_tokens.argmin())] == 1
    assert counts[-1][int(n_tokens.argmax())] > 1
