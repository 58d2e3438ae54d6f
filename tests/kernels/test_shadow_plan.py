import pytest
import torch
from torch import Tensor

from lit_rlkv.kernels.shadow_attention import SlotPlan, plan_slots
from lit_rlkv.kernels.shadow_attention.reference import visible
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.rollout import generate
from lit_rlkv.types import NEVER
from tests.kernels.shadow_cases import cache_evictions, layer_plan, random_evictions
from tests.models_zoo import ragged_prompts, tiny_model


def living_keys(evicted_at: Tensor, block: int) -> list[list[set[int]]]:
    """Return the keys that any query of each block sees, for each row of a table [row seq]."""
    is_visible = visible(evicted_at)
    return [
        [set(queries.any(0).nonzero()[:, 0].tolist()) for queries in row.split(block)] for row in is_visible
    ]


def collisions(plan: SlotPlan, evicted_at: Tensor) -> int:
    """Return the number of keys that share a slot with another key of the same block."""
    n = 0
    for slots, blocks in zip(
        plan.slot_of.flatten(0, 1), living_keys(evicted_at.flatten(0, 1), plan.block), strict=True
    ):
        for keys in blocks:
            taken = slots[list(keys)].tolist()
            assert all(0 <= slot < plan.n_slots for slot in taken)
            n += len(taken) - len(set(taken))
    return n


TABLES = {
    "one position": random_evictions(1),
    "any evictions": random_evictions(63),
    "any evictions of a long sequence": random_evictions(300),
    "a cache": cache_evictions(130),
    "a cache with prompts over its budget": cache_evictions(130, prompt_lens=(60, 35), budget=16),
    "all keys die at once": torch.full((1, 2, 40), 21).int(),
    "nothing lives": torch.zeros(2, 2, 33).int(),
    "nothing dies": torch.full((2, 2, 33), NEVER).int(),
}


@pytest.mark.parametrize("block", [1, 8, 16, 128])
@pytest.mark.parametrize("evicted_at", TABLES.values(), ids=TABLES)
def test_keys_cached_in_the_same_block_never_share_a_slot(evicted_at: Tensor, block: int):
    assert collisions(layer_plan(evicted_at, block), evicted_at) == 0


def test_the_count_of_collisions_catches_a_plan_with_one_slot_less_or_of_another_table():
    evicted_at = cache_evictions(130)
    plan = layer_plan(evicted_at, 16)
    fewer = SlotPlan(16, plan.n_slots, plan.slot_of % (plan.n_slots - 20))
    assert collisions(fewer, evicted_at) > 0
    assert collisions(plan, cache_evictions(130, budget=20)) > 0


def test_slots_match_hand_arithmetic():
    # Blocks of 2 queries. Key 0 is the first to die, at 2, in block 0, and keeps to itself.
    # Of the others two live at once: 1 and 2 in block 1, then 3 to 5 must wait for slots.
    #   key 1 [1, 4) blocks 0-1, key 2 [2, 3) block 1, key 3 never lives, key 4 [4, 8) blocks 2-3,
    #   key 5 [5, 6) block 2, key 6 [6, 8) block 3, key 7 never lives.
    # Births give 1 -> 0, 2 -> 1; released are 1, 2 (block 1), 5 (block 2): 4 -> 0, 5 -> 1, 6 -> that of 5, 1.
    evicted_at = torch.tensor([[[2, 4, 3, 3, 8, 6, NEVER, 0]]]).int()
    plan = layer_plan(evicted_at, 2)
    assert plan.n_slots == 3
    lives = [0, 1, 2, 4, 5, 6]
    assert plan.slot_of[0, 0, lives].tolist() == [2, 0, 1, 0, 1, 1]


@pytest.mark.parametrize("block", [8, 16])
def test_there_are_as_many_slots_as_keys_live_at_once_and_at_most_those_that_die_first_beside_them(
    block: int,
):
    for evicted_at in TABLES.values():
        rows = living_keys(evicted_at.flatten(0, 1), block)
        most = max(len(keys) for blocks in rows for keys in blocks)
        die_first = 0
        for blocks in rows:
            ends = [(a - b) for a, b in zip(blocks, [*blocks[1:], set()], strict=True)]
            die_first = max(die_first, next((len(keys) for keys in ends if keys), 0))
        assert max(1, most) <= layer_plan(evicted_at, block).n_slots <= max(1, most + die_first)


def test_after_a_long_prompt_is_compacted_most_slots_stay_empty():
    # 200 prompt keys fall to 20; afterwards 20 to 30 live. No later key takes one of the 180 slots.
    evicted_at = cache_evictions(400, prompt_lens=(200,), n_kv_heads=1, budget=20, interval=10)
    plan = layer_plan(evicted_at, 16)
    later = [
        slot
        for keys in living_keys(evicted_at[0], 16)[0][14:]
        for slot in plan.slot_of[0, 0, list(keys)].tolist()
    ]
    assert max(later) < 20 + 10 + 16 + 10
    assert plan.n_slots > 180


def test_one_plan_serves_all_layers_and_each_takes_its_own():
    evicted_at = torch.stack([cache_evictions(130), cache_evictions(130, budget=6)], dim=1)
    plan = plan_slots(evicted_at, 16)
    assert plan is not None
    for layer in range(2):
        assert collisions(plan.layer(layer), evicted_at[:, layer]) == 0
    assert collisions(plan.layer(1), evicted_at[:, 0]) > 0
    shared = plan_slots(evicted_at[:, :1], 16)
    assert shared is not None
    assert torch.equal(shared.layer(5).slot_of, shared.layer(0).slot_of)


def test_there_is_no_plan_if_too_few_keys_are_evicted():
    dense = torch.full((1, 1, 1, 100), NEVER).int()
    assert plan_slots(dense, 2) is None
    # Keys could live in 2 x (50 + .. + 1) = 2550 blocks; the first 10 take 480 of them, the first 20 910:
    # 0.81 and 0.64 of the work are left.
    few, many = dense.clone(), dense.clone()
    few[..., :10] = 0
    many[..., :20] = 0
    assert plan_slots(few, 2) is None
    assert plan_slots(many, 2) is not None


def test_there_is_no_plan_where_tables_would_outgrow_the_sequence(monkeypatch: pytest.MonkeyPatch):
    # 20 of 100 keys live, all at once, in blocks of 2.
    evicted_at = torch.zeros(1, 1, 1, 100).int()
    evicted_at[..., :20] = NEVER
    monkeypatch.setattr("lit_rlkv.kernels.shadow_attention.plan.MAX_ENTRIES", 10)
    assert plan_slots(evicted_at, 2) is not None
    monkeypatch.setattr("lit_rlkv.kernels.shadow_attention.plan.MAX_ENTRIES", 9)
    assert plan_slots(evicted_at, 2) is None


@pytest.mark.parametrize("block", [0, 3, 256])
def test_blocks_that_tables_cannot_hold_are_refused(block: int):
    with pytest.raises(ValueError, match=f"block must be a power of two from 1 to 128, got {block}"):
        plan_slots(torch.zeros(1, 1, 1, 4).int(), block)


def test_the_evictions_of_a_real_rollout_have_a_plan():
    prompts, attention_mask = ragged_prompts()
    rollout = generate(
        tiny_model(),
        prompts,
        attention_mask,
        cache=CacheSpec("random", budget=8, interval=4, sink=1, window=2),
        max_new_tokens=40,
        eos_token_id=None,
        pad_token_id=0,
        generator=torch.Generator().manual_seed(0),
    )
    evicted_at = rollout.record.view(rollout.attention_mask, shadow=True).evicted_at
    plan = plan_slots(evicted_at, 8)
    assert plan is not None
    for layer in range(evicted_at.shape[1]):
        assert collisions(plan.layer(layer), evicted_at[:, layer]) == 0
