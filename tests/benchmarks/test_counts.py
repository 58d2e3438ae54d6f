"""Formulas of the benchmarks, by hand: bytes and flops, evictions of a simulated sampler, extrapolations."""

import pytest
import torch
from hydra_parts.measure import largest_fitting
from kernel_parts.accuracy import WrongKernelError, excess_error, require_accurate
from kernel_parts.counts import Work, attention_work, decode_work, evict_work, head_work, score_work
from kernel_parts.evictions import NEVER, Schedule, n_visible, simulate_evictions
from kernel_parts.timing import spread
from rollout_parts import ours, theirs
from time_limit import TimeLimit

from lit_rlkv.kernels.shadow_attention.reference import visible


def test_decode_is_counted_by_hand():
    # 2 rows x 3 KV heads, 5 slots of 4 numbers of 2 bytes. K and V: 2 · 6 · 5 · 4 · 2 = 480. Queries and
    # outputs of 7 heads each: 2 · 6 · 7 · 4 · 2 = 672. Scores read and written: 2 · 6 · 5 · 4 = 240.
    # Flops: 42 query heads · 5 slots · (2 · 4 for q·k + 2 · 4 for p·v) = 3360.
    assert decode_work(6, 7, 5, 4, 2, n_score_passes=2) == Work(480 + 672 + 240, 3360)


def test_attention_is_counted_by_hand():
    # 10 pairs, dim 4: forward 2 products, backward 5, each 2 · 4 flops a pair: 7 · 8 · 10.
    # Bytes: q, o, dq.. of 4 heads and k, v, .. of 2, six passes over 3 tokens · 4 numbers · 2 bytes; and
    # log-sum-exp of 4 heads · 3 tokens written and read in 4 bytes.
    assert attention_work(10, 1, 4, 2, 3, 4, 2) == Work(6 * 6 * 24 + 2 * 48, 560)


def test_heads_scores_and_compactions_are_counted_by_hand():
    # Three products of [5, 4] and [4, 100], 2 · 5 · 4 · 100 flops each; weights three times, hidden twice.
    assert head_work(5, 4, 100, 2, 3, 3) == Work((3 * 400 + 2 * 20) * 2, 12_000)
    # Keys of 3 pools x 10 slots x 4 numbers x 2 bytes, and a float32 for each slot.
    assert score_work(3, 10, 1, 4, 2) == Work(240 + 120, 0)
    # 30 slots: score 4, column 8. 6 keys move: K, V read and written, 4 · 4 · 2 each, column 8. 9 evictions.
    assert evict_work(3, 10, 6, 9, 4, 2) == Work(30 * 12 + 6 * (32 + 8) + 9 * 4, 0)


def test_an_error_is_in_units_of_plain_torchs_own():
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    plain, actual = (truth + shift for shift in (0.01, 0.03))
    assert excess_error(actual, plain, truth) == pytest.approx(3.0)
    with pytest.raises(WrongKernelError, match="op: out is off by 5 of"):
        require_accurate("op", {"out": (truth + 0.05, plain, truth)})
    with pytest.raises(WrongKernelError, match="off by inf"):
        require_accurate("op", {"out": (truth * torch.nan, plain, truth)})


def test_quantiles_lie_between_measurements():
    # Eleven measurements: the second and the last but one are the 10th and the 90th percentile.
    found = spread([float(n) for n in range(11)])
    assert (found.median, found.p10, found.p90) == (5.0, 1.0, 9.0)


def test_the_simulated_pool_is_filled_and_emptied_as_a_cache_does_it():
    # A prompt of 6 exceeds the budget of 24 after 24 steps: query 29 sees 30 keys, query 30 24 and its own.
    # From then on 24 + 8 slots are full after every 8 steps.
    schedule = Schedule(budget=24, interval=8, sink=2, window=5, prompt=6)
    evicted_at = simulate_evictions((3,), 150, schedule)
    n_living = visible(evicted_at).sum(-1)
    assert [set(n_living[:, query].tolist()) for query in (29, 30, 37, 38)] == [{30}, {25}, {32}, {25}]
    assert (evicted_at[:, :2] == NEVER).all()  # the sinks
    assert (evicted_at >= torch.arange(150) + 5).all()  # no key dies in the window
    assert not torch.equal(evicted_at[0], evicted_at[1])


def test_visible_pairs_are_counted_over_lifetimes():
    # Key 0 is seen by queries 0 to 3, key 1 by 1, key 2 by 2, key 3 by 3: 4 + 1 + 1 + 1 pairs.
    assert n_visible(torch.tensor([NEVER, 2, 3, NEVER])) == 7


def test_steps_of_generate_are_integrated_along_a_line():
    # 1 s and 0.1 s for each cached token: 10 steps with 20 .. 29 tokens take 10 + 0.1 * 245
    steps = theirs.Steps([10.0, 20.0, 40.0], [2.0, 3.0, 5.0])
    assert steps.integrate(20, 10) == pytest.approx(34.5)
    assert steps.fit_error == pytest.approx(0, abs=1e-9)
    assert theirs.Steps([10.0, 20.0, 30.0], [2.0, 3.0, 5.0]).fit_error > 0.05


def test_a_rollout_that_is_cut_off_is_extrapolated_from_its_last_half():
    progress = ours.Progress(TimeLimit(), n_tokens=[0, 10, 20, 40], seconds=[0.0, 1.0, 3.0, 7.0])
    # 20 tokens in the last half took 4 s, so 60 more take 12
    assert progress.whole_s(100) == pytest.approx(7 + 12)


@pytest.mark.parametrize("guess", [1, 7, 200])
def test_the_largest_batch_is_found_from_any_guess(guess):
    # 90 + 10 per row: one row needs 100
    for limit, largest in ((99, 0), (109, 1), (1005, 91)):
        assert largest_fitting(lambda batch: 90 + 10 * batch, limit, guess) == largest
