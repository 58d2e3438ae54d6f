import math

import pytest
import torch

from lit_rlkv.diagnostics.position_bins import (
    MAX_BINS,
    as_lists,
    bin_starts,
    by_position,
    log_ratios_by_position,
    overlap_tails,
    overlaps_by_position,
    prefixes_by_position,
)

NAN = math.nan
L = math.log(2)
IS_ACTION = torch.tensor([[False, False, True, True, True], [False, False, True, False, False]])
LOG_RATIO = torch.tensor([[NAN, NAN, L, -L, 2 * L], [NAN, NAN, -L, NAN, NAN]])
"""Two columns of prompt, then responses of three and of one action."""


def test_a_position_counts_the_tokens_of_a_response():
    found = by_position(torch.arange(10.0).view(2, 5), IS_ACTION)
    torch.testing.assert_close(
        found, torch.tensor([[2.0, 7.0], [3.0, NAN], [4.0, NAN]]), equal_nan=True, rtol=0, atol=0
    )
    assert bin_starts(IS_ACTION).tolist() == [0, 1, 2]


def test_tokens_given_between_turns_take_no_position():
    turns = torch.tensor([[False, True, False, True, True], [False, True, True, False, False]])
    found = by_position(torch.arange(10.0).view(2, 5), turns)
    torch.testing.assert_close(
        found, torch.tensor([[1.0, 6.0], [3.0, 7.0], [4.0, NAN]]), equal_nan=True, rtol=0, atol=0
    )
    assert bin_starts(turns).tolist() == [0, 1, 2]
    # log Π ρ so far: 1, 3, 6 and 10, 30, then 30 of the response that has ended.
    log_ratio = torch.tensor([[NAN, 1.0, NAN, 2.0, 3.0], [NAN, 10.0, 20.0, NAN, NAN]])
    so_far = prefixes_by_position(log_ratio, turns)["prefix_abs_log_ratio"]
    assert so_far.tolist() == [(1 + 10) / 2, (3 + 30) / 2, (6 + 30) / 2]


def test_statistics_by_position_match_hand_arithmetic():
    found = log_ratios_by_position(LOG_RATIO, IS_ACTION)
    assert found["n_response_tokens"].tolist() == [2, 1, 1]
    assert found["k1"].tolist() == pytest.approx([0.0, L, -2 * L])
    # rho - log rho - 1: 1 - L and L - 1/2; L - 1/2; 3 - 2 L
    assert found["k3"].tolist() == pytest.approx([0.25, L - 0.5, 3 - 2 * L])
    assert found["abs_log_ratio_p95"].tolist() == pytest.approx([L, L, 2 * L])


def test_tails_lie_between_the_two_largest_of_a_few():
    # |log rho| = 0, 1, .., 20: the 95th percentile is 19, the 99th 19.8
    log_ratio = torch.arange(21.0)[:, None] * torch.tensor([1.0, -1.0])
    found = log_ratios_by_position(log_ratio, torch.ones(21, 2, dtype=torch.bool))
    assert found["abs_log_ratio_p95"].tolist() == pytest.approx([19.0, 19.0])
    assert found["abs_log_ratio_p99"].tolist() == pytest.approx([19.8, 19.8])


def test_prefixes_keep_what_a_finished_response_ended_with():
    found = prefixes_by_position(LOG_RATIO, IS_ACTION)
    # log weights of the rows: (L, -L), (0, -L), (2 L, -L)
    assert found["prefix_abs_log_ratio"].tolist() == pytest.approx([L, L / 2, 1.5 * L])
    # weights (2, 1/2), (1, 1/2), (4, 1/2): (sum)^2 / (2 sum of squares)
    expected = [6.25 / 8.5, 2.25 / 2.5, 20.25 / 32.5]
    assert found["prefix_ess"].tolist() == pytest.approx(expected, rel=1e-5)


def test_weights_without_drift_lose_no_sample_however_long():
    response_mask = torch.ones(8, 50, dtype=torch.bool)
    noise = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    still = prefixes_by_position(torch.full((8, 50), -0.3), response_mask)["prefix_ess"]
    assert still.tolist() == pytest.approx([1.0] * 50, rel=1e-4)
    drifting = prefixes_by_position(noise, response_mask)["prefix_ess"]
    assert drifting[-1] < 0.3 < drifting[0]


def test_long_responses_are_cut_into_bins():
    n = 2 * MAX_BINS + 5
    response_mask = torch.ones(3, n, dtype=torch.bool)
    values = torch.arange(float(n)).expand(3, n)
    found = by_position(values, response_mask)
    starts = bin_starts(response_mask)
    assert len(starts) == len(found) <= MAX_BINS
    assert starts[:3].tolist() == [0, 3, 6]  # 133 positions in bins of three
    assert found.nanmean(dim=1)[:3].tolist() == [1.0, 4.0, 7.0]
    assert found[-1].isfinite().sum() == 3  # the last bin has one position, of three rows
    arrays = {**log_ratios_by_position(values, response_mask), **prefixes_by_position(values, response_mask)}
    assert {len(array) for array in arrays.values()} == {len(starts)}


def test_overlaps_are_of_the_responses_that_were_looked_at():
    overlap = torch.tensor([[0.0, 0.0, 0.5, 0.25, 1.0], [NAN] * 5])
    found = overlaps_by_position(overlap, IS_ACTION)
    assert found["overlap_mean"].tolist() == [0.5, 0.25, 1.0]
    assert found["overlap_p05"].tolist() == [0.5, 0.25, 1.0]


def test_tails_are_of_bins_that_do_not_move_with_the_longest_response():
    overlap = torch.linspace(1.0, 0.0, 42).expand(3, 42).clone()
    overlap[2] = NAN
    response_mask = torch.ones(3, 42, dtype=torch.bool)
    response_mask[:, :2] = False
    found = overlap_tails(overlap, response_mask)
    assert list(found) == [0, 8, 32]
    for start, end in ((0, 8), (8, 32), (32, 40)):
        expected = overlap[:2, 2 + start : 2 + end].quantile(0.05)
        assert float(found[start]) == pytest.approx(float(expected))
    shorter = overlap_tails(overlap[:, :20], response_mask[:, :20])
    assert list(shorter) == [0, 8]
    assert shorter[0] == found[0]


def test_lists_are_json():
    arrays = {"a": torch.tensor([1.0, NAN]), "b": torch.tensor([1, 2])}
    assert as_lists(arrays) == {"a": [1.0, None], "b": [1, 2]}
