import pytest
import torch
from shadow_work import TILES, count, tile_pairs

from lit_rlkv.kernels.shadow_attention import plan_slots
from lit_rlkv.types import NEVER


def test_tiles_are_counted_as_by_hand():
    # 1024 keys in eight blocks of 128 queries. The first 128 keys live on, all others die with their block.
    evicted_at = (torch.arange(1024) // 128 + 1).mul(128).int()
    evicted_at[:128] = NEVER
    plan = plan_slots(evicted_at[None, None, None])
    assert plan is not None
    # Block 0 lists 128 keys, each other block those and its own 128; in slots as many.
    pairs = 128 * (128 + 7 * 256)
    assert (TILES.forward.keys, TILES.key_gradients.keys) == (64, 128)
    # All queries of the seven later blocks see the first 128 keys; a block's own keys only some of them.
    assert tile_pairs(evicted_at[None], plan) == ((pairs, pairs), (7 * 128 * 128, 7 * 128 * 128))


@pytest.mark.parametrize("budget", [256, 512])
def test_the_work_is_little_more_than_what_was_seen(budget: int):
    found = count(seq=4096, interval=128, n_kv_heads=2, prompt=128, budget=budget)
    assert found["visible"] < found["forward"] < found["visible"] + 0.05
    assert found["visible"] < found["key_gradients"] < found["visible"] + 0.06
    assert found["forward"] < 0.35
