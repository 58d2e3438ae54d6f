import torch

from lit_rlkv.reporting import plots
from lit_rlkv.types import Rollout
from tests.reporting.plots.drawn import TWO_HEADS, N, line, make_rollout


def test_cache_fill_counts_births_less_evictions():
    figure = plots.cache_fill(TWO_HEADS, budget=2, interval=1)
    live, dense = line(figure, "live, mean"), line(figure, "dense, mean")
    # queries are columns 1 to 4: the last token was never one; the response begins at column 3
    assert list(live.get_xdata()) == [-2, -1, 0, 1]
    # at column 4, head 0 has lost one of four keys and head 1 two: (3 + 2) / 2
    assert list(live.get_ydata()) == [1, 2, 3, 2.5]
    assert list(dense.get_ydata()) == [1, 2, 3, 4]
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    assert sorted(set(band[band[:, 0] == 1, 1])) == [2, 3]


def test_cache_fill_notices_an_eviction_that_comes_one_query_late():
    late = make_rollout([[[0, N, 5, N, N, N], [0, 5, 5, N, N, N]]])
    assert list(line(plots.cache_fill(late), "live, mean").get_ydata()) == [1, 2, 3, 4]


def test_cache_fill_marks_budget_and_slots():
    levels = {
        found.get_label(): found.get_ydata()[0] for found in plots.cache_fill(TWO_HEADS, 2, 1).axes[0].lines
    }
    assert levels["_budget 2"] == 2
    assert levels["_slots 3"] == 3
    assert "_budget 2" not in {found.get_label() for found in plots.cache_fill(TWO_HEADS).axes[0].lines}


def test_live_keys_agree_with_their_definition():
    seq = 23
    column = torch.arange(seq)
    attention_mask = torch.stack(
        [(column >= start) & (column < end) for start, end in ((0, 23), (5, 20), (3, 9))]
    )
    evicted_at = (
        (column + torch.randint(1, 30, (3, 2, 4, seq))).int().masked_fill(~attention_mask[:, None, None], 0)
    )
    rollout = Rollout(
        torch.zeros(3, seq).long(), attention_mask, attention_mask, torch.zeros(3, seq), evicted_at, 0
    )
    is_live = (column[None, :] <= column[:, None]) & (evicted_at[..., None, :] > column[:, None])
    expected = (is_live & attention_mask[:, None, None, None]).sum(-1)
    assert torch.equal(plots.live_keys(rollout), expected)
    is_live_late = (column[None, :] <= column[:, None]) & (evicted_at[..., None, :] >= column[:, None])
    assert not torch.equal((is_live_late & attention_mask[:, None, None, None]).sum(-1), expected)


def test_cache_fill_averages_only_over_rows_that_still_write():
    rollout = make_rollout([[[N, N, N, N, N]]], n_pad=0)
    ends_early = torch.tensor([[True, True, True, False, False]])
    both = Rollout(
        input_ids=rollout.input_ids.repeat(2, 1),
        attention_mask=torch.cat([rollout.attention_mask, ends_early]),
        response_mask=torch.cat([rollout.response_mask, rollout.response_mask & ends_early]),
        rollout_logps=torch.zeros(2, 5),
        evicted_at=torch.cat([rollout.evicted_at, torch.where(ends_early, N, 0).int()[:, None, None]]),
        kv_bytes=0,
    )
    # queries of the long row are columns 0 to 3, of the short one 0 and 1: its idle columns do not count
    assert list(line(plots.cache_fill(both), "live, mean").get_ydata()) == [1, 2, 3, 4]
