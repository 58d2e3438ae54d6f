"""The number of splits of dK and dV: a model of waves, worked by hand."""

from itertools import product

import pytest
import torch

from lit_rlkv.kernels.device import A100, H100, L40S, Device
from lit_rlkv.kernels.shadow_attention import launch
from lit_rlkv.kernels.shadow_attention.splits import choose_n_splits, programs_per_multiprocessor
from lit_rlkv.kernels.shadow_attention.tiles import FLOAT32, LARGE, SMALL, Tiles


def cost(n: int, n_programs: int, n_at_once: int, work: float, merge: float) -> float:
    """Time of whole waves, and of a sum if there is one."""
    waves = (n * n_programs + n_at_once - 1) // n_at_once
    return waves * work / n + (merge * n if n > 1 else 0)


def test_the_number_of_splits_follows_the_waves():
    # 80 programs on 132 multiprocessors, 4 heads each: one wave of 4, 2 of 2, or 3 of 1.
    assert choose_n_splits(4, 80, 132, work=4.0, merge=0.0) == 4
    # A sum that takes 0.3 of a head's time eats the gain of 1: 4 · 0.3.
    assert choose_n_splits(4, 80, 132, work=4.0, merge=0.3) == 1
    # All multiprocessors busy in one wave: any split only adds the sum. One program more is a second wave.
    assert choose_n_splits(4, 132, 132, work=4.0, merge=0.01) == 1
    assert choose_n_splits(4, 133, 132, work=4.0, merge=0.01) == 4  # 5 waves of 1 instead of 2 of 4


SIZES = list(product((1, 2, 4, 6, 7, 8), (1, 10, 80, 131, 132, 133, 500, 3000), (108, 132, 264)))


@pytest.mark.parametrize("merge", [0.0, 0.05, 1.0])
def test_the_choice_is_the_cheapest_divisor_of_the_group(merge: float):
    for group, n_programs, n_at_once in SIZES:
        n = choose_n_splits(group, n_programs, n_at_once, 4.0, merge)
        assert 1 <= n <= group
        assert group % n == 0
        others = [cost(m, n_programs, n_at_once, 4.0, merge) for m in range(1, group + 1) if group % m == 0]
        assert cost(n, n_programs, n_at_once, 4.0, merge) == min(others)


@pytest.mark.parametrize(
    ("tiles", "row_bytes", "device", "expected"),
    [
        (LARGE[64].key_gradients, 2 * 64 * 2, H100, 1),  # 8 warps take all registers
        (LARGE[128].key_gradients, 2 * 128 * 2, H100, 1),
        (SMALL[64].key_gradients, 2 * 64 * 2, A100, 2),  # 4 warps: two fit, and their 2 · 49 KiB into 164
        (SMALL[64].key_gradients, 2 * 64 * 2, L40S, 2),
        (FLOAT32[64].key_gradients, 2 * 64 * 4, L40S, 2),  # 49 KiB each of 100
        (Tiles(128, 128, 4, 3), 2 * 64 * 2, L40S, 1),  # more shared memory than there is twice
    ],
)
def test_registers_and_shared_memory_bound_the_programs_of_a_multiprocessor(
    tiles: Tiles, row_bytes: int, device: Device, expected: int
):
    assert programs_per_multiprocessor(tiles, row_bytes, device) == expected


def n_splits(batch: int, n_slots: int, n_at_once: int = 132, seq: int = 16_384) -> int:
    query = torch.empty(batch, 32, seq, 128, dtype=torch.bfloat16, device="meta")
    key, value = (torch.empty(batch, 8, seq, 128, dtype=query.dtype, device="meta") for _ in range(2))
    evicted_at = torch.empty(batch, 8, seq, dtype=torch.int32, device="meta")
    inputs = launch.Inputs(query, key, value, evicted_at, 1.0, None, 128, n_slots)
    keys = inputs.tiles.key_gradients.keys
    return launch._n_splits(inputs, -(-(n_slots or seq) // keys), n_at_once)


def test_splits_of_a_learner_at_a_budget_of_1024():
    # 10 tiles of slots and 8 KV heads are 80 programs a sequence, on 132 multiprocessors.
    assert [n_splits(batch, 1280) for batch in (1, 2, 4, 32)] == [4, 4, 2, 1]
    assert n_splits(1, 0) == 1  # 1,024 programs without lists
    assert n_splits(1, 1280, n_at_once=80) == 1  # one full wave
