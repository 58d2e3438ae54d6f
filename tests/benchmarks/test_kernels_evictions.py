import pytest
import torch
from kernel_parts.evictions import NEVER, Schedule, n_visible, simulate_evictions
from torch import Tensor

from lit_rlkv.kernels.shadow_attention.reference import visible

SEQ = 150
SHORT_PROMPT = Schedule(budget=24, interval=8, sink=2, window=5, prompt=6)
LONG_PROMPT = Schedule(budget=24, interval=8, sink=2, window=5, prompt=60)
LEAD = (2, 3, 4)


def problems(evicted_at: Tensor, schedule: Schedule) -> list[str]:
    """Check that a sampler with this schedule could have written the table."""
    n_living = visible(evicted_at).sum(-1)  # [*lead seq], keys that each query sees
    seq = evicted_at.shape[-1]
    column = torch.arange(seq)
    found = []
    # A query sees at most what the pool holds; those of the prompt see all of it.
    if (n_living > schedule.budget + schedule.interval)[..., schedule.prompt :].any():
        found.append("more keys than slots")
    if (n_living[..., : schedule.prompt] != column[: schedule.prompt] + 1).any():
        found.append("the prompt is not dense")
    if (evicted_at[..., : schedule.sink] != NEVER).any():
        found.append("a sink died")
    if (evicted_at <= column + schedule.window - 1).any():
        found.append("a key died in the window")
    times = set(evicted_at.unique().tolist()) - {NEVER}
    if not times <= set(schedule.compactions(seq)):
        found.append("evictions between compactions")
    return found


@pytest.mark.parametrize("schedule", [SHORT_PROMPT, LONG_PROMPT])
def test_simulated_tables_are_those_of_a_sampler(schedule: Schedule):
    evicted_at = simulate_evictions(LEAD, SEQ, schedule)
    assert evicted_at.shape == (*LEAD, SEQ)
    assert problems(evicted_at, schedule) == []


def test_broken_tables_are_told_from_simulated_ones():
    evicted_at = simulate_evictions(LEAD, SEQ, SHORT_PROMPT)
    later = torch.where(evicted_at == NEVER, NEVER, evicted_at + 8)
    assert "more keys than slots" in problems(later, SHORT_PROMPT)
    assert "evictions between compactions" in problems(evicted_at.clamp(max=SEQ - 1), SHORT_PROMPT)
    assert "a sink died" in problems(evicted_at.roll(20, -1), SHORT_PROMPT)


def test_the_pool_is_filled_and_emptied_as_a_cache_does_it():
    # A prompt of 6 exceeds the budget of 24 after 24 steps: query 29 sees 30 keys, query 30 24 and its own.
    # From then on 24 + 8 slots are full after every 8 steps.
    n_living = visible(simulate_evictions((3,), SEQ, SHORT_PROMPT)).sum(-1)
    assert (n_living[:, 29] == 30).all()
    assert (n_living[:, 30] == 25).all()
    assert (n_living[:, 37] == 32).all()
    assert (n_living[:, 38] == 25).all()
    # A prompt of 60 is prefilled densely and compacted at once.
    n_living = visible(simulate_evictions((3,), SEQ, LONG_PROMPT)).sum(-1)
    assert (n_living[:, 59] == 60).all()
    assert (n_living[:, 60] == 25).all()


def test_a_seed_gives_one_table_and_heads_differ():
    first, again = (simulate_evictions(LEAD, SEQ, SHORT_PROMPT, seed=3) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, simulate_evictions(LEAD, SEQ, SHORT_PROMPT, seed=4))
    assert not torch.equal(first[0, 0, 0], first[0, 0, 1])


def test_heavy_hitters_outlive_what_is_merely_recent():
    # With a policy that kept the most recent, the oldest survivor that is no sink would be 24 - 2 tokens old.
    evicted_at = simulate_evictions((8,), SEQ, SHORT_PROMPT)
    old = evicted_at[:, SHORT_PROMPT.sink : SEQ - 40]
    assert (old == NEVER).any()
    assert (old < NEVER).any()


def test_visible_pairs_are_counted_over_lifetimes():
    # Key 0 is seen by queries 0 to 3, key 1 by 1, key 2 by 2, key 3 by 3: 4 + 1 + 1 + 1 pairs; and none
    # of a dead one.
    assert n_visible(torch.tensor([NEVER, 2, 3, NEVER])) == 7
    assert n_visible(torch.tensor([[NEVER, 2, 3, NEVER], [0, 0, 0, NEVER]])) == 8
    evicted_at = simulate_evictions(LEAD, SEQ, LONG_PROMPT)
    assert n_visible(evicted_at) == int(visible(evicted_at).sum())
