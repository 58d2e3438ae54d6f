import json

import pytest
import torch
from matplotlib.collections import PolyCollection

from lit_rlkv.reporting.eviction_record import eviction_record, fill_record, lifetimes_record
from lit_rlkv.reporting.plots import kept_keys, style
from lit_rlkv.types import Record, Rollout
from tests.hand_built import one_row
from tests.reporting.plots.drawn import NOTHING, TWO_HEADS, N, line


def test_cache_fill_counts_births_less_evictions():
    figure = kept_keys.cache_fill(fill_record(TWO_HEADS), budget=2, interval=1)
    live, dense = line(figure, "cached, mean"), line(figure, "dense, mean")
    # queries are columns 1 to 4: the last token was never one; the response begins at column 3
    assert list(live.get_xdata()) == [-2, -1, 0, 1]
    # at column 4, head 0 has lost one of four keys and head 1 two: (3 + 2) / 2
    assert list(live.get_ydata()) == [1, 2, 3, 2.5]
    assert list(dense.get_ydata()) == [1, 2, 3, 4]
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    assert sorted(set(band[band[:, 0] == 1, 1])) == [2, 3]


def test_cache_fill_notices_an_eviction_that_comes_one_query_late():
    late = one_row([[[0, N, 5, N, N, N], [0, 5, 5, N, N, N]]])
    assert list(line(kept_keys.cache_fill(fill_record(late)), "cached, mean").get_ydata()) == [1, 2, 3, 4]


def test_cache_fill_marks_budget_and_slots():
    levels = {
        found.get_label(): found.get_ydata()[0]
        for found in kept_keys.cache_fill(fill_record(TWO_HEADS), 2, 1).axes[0].lines
    }
    assert (levels["budget 2"], levels["slots 3"]) == (2, 3)
    unmarked = kept_keys.cache_fill(fill_record(TWO_HEADS)).axes[0].lines
    assert "budget 2" not in {found.get_label() for found in unmarked}


def drawn_lifetimes(rollout, row=0, token_labels=None):
    return kept_keys.key_lifetimes(lifetimes_record(rollout, row, token_labels))


CACHE = {
    "iteration": 11,
    "name": "cache",
    "position": [0, 1, 2],
    "attention_on_dead": [[0.0, 0.1, 0.3], [0.0, 0.2, 0.5], [0.0, 0.3, 0.1]],
}


def test_attention_on_evicted_keys_shows_mean_spread_and_the_worst_layer():
    axes = kept_keys.attention_on_evicted(CACHE).axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["their mean"] == pytest.approx([0.0, 0.2, 0.3])
    assert lines["layer 1, the highest"] == [0.0, 0.2, 0.5]
    band = axes.collections[0].get_paths()[0].vertices
    assert sorted(set(band[band[:, 0] == 2, 1])) == [0.1, 0.5]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: kept_keys.cache_fill(fill_record(TWO_HEADS)),
        lambda: drawn_lifetimes(NOTHING, 0),
        lambda: kept_keys.attention_on_evicted(CACHE),
    ],
)
def test_figures_render(draw, tmp_path):
    draw().savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def bars(axes):
    """(key, birth, end, color) of each bar of a panel of lifetimes."""
    (collection,) = (found for found in axes.collections if isinstance(found, PolyCollection))
    found = []
    for path, color in zip(collection.get_paths(), collection.get_facecolors(), strict=True):
        x, y = path.vertices[:, 0], path.vertices[:, 1]
        found.append((int(y.min()), x.min(), x.max(), tuple(color)))
    return found


def blue():
    return tuple(PolyCollection([], facecolors=[style.BLUE]).get_facecolor()[0])


def test_lifetimes_run_from_birth_to_eviction_without_the_padding():
    first, second = drawn_lifetimes(TWO_HEADS, row=0).axes
    # tokens 0 to 3 stand in columns 1 to 4; the query of column 4 is token 3; the fifth token has no key yet
    assert [bar[:3] for bar in bars(first)] == [(0, 0, 4), (1, 1, 3), (2, 2, 4), (3, 3, 4)]
    assert [bar[:3] for bar in bars(second)] == [(0, 0, 3), (1, 1, 3), (2, 2, 4), (3, 3, 4)]
    assert [bar[3] == blue() for bar in bars(first)] == [True, False, True, True]
    assert [bar[3] == blue() for bar in bars(second)] == [False, False, True, True]


def test_tokens_are_written_beside_short_sequences_only():
    texts = drawn_lifetimes(TWO_HEADS, 0, list("1+2=3")).axes[0].get_yticklabels()
    assert [text.get_text() for text in texts] == ["1", "+", "2", "="]
    seq = kept_keys.MAX_LABELLED_TOKENS + 1
    long = one_row(torch.full((1, 1, seq), N), n_pad=0)
    texts = drawn_lifetimes(long, 0, ["x"] * seq).axes[0].get_yticklabels()
    assert "x" not in {text.get_text() for text in texts}


def test_tokens_that_cannot_be_seen_are_written_as_signs():
    figure = drawn_lifetimes(TWO_HEADS, 0, [" a", "\n", "\x1b$x$", "internationally", "<eos>"])
    texts = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert texts == ["␣a", "⏎", "\\x1b$x$", "internati…"]


def test_the_record_of_a_rollout_is_of_its_longest_sequence_and_survives_json():
    short = torch.tensor([[False, False, True, True, True, True]])
    both = Rollout(
        input_ids=torch.arange(12).view(2, 6),
        attention_mask=torch.cat([short, TWO_HEADS.attention_mask]),
        response_mask=TWO_HEADS.response_mask.repeat(2, 1),
        rollout_logps=torch.zeros(2, 6),
        record=Record(TWO_HEADS.evicted_at.repeat(2, 1, 1, 1)),
        kv_bytes=0,
    )
    record = eviction_record(both, str)
    assert json.loads(json.dumps(record)) == record
    lifetimes = record["lifetimes"]
    assert (lifetimes["n_keys"], lifetimes["n_prompt"]) == (4, 2)
    assert lifetimes["labels"] == ["7", "8", "9", "10"]  # tokens of the second row, without padding
    # columns are numbered from the first token, which is column 1; NEVER is None
    assert lifetimes["evicted_at"] == [[[None, 3, None, None], [3, 3, None, None]]]


def test_cache_fill_averages_only_over_rows_that_still_write():
    rollout = one_row([[[N, N, N, N, N]]], n_pad=0)
    ends_early = torch.tensor([[True, True, True, False, False]])
    both = Rollout(
        input_ids=rollout.input_ids.repeat(2, 1),
        attention_mask=torch.cat([rollout.attention_mask, ends_early]),
        response_mask=torch.cat([rollout.response_mask, rollout.response_mask & ends_early]),
        rollout_logps=torch.zeros(2, 5),
        record=Record(torch.cat([rollout.evicted_at, torch.where(ends_early, N, 0).int()[:, None, None]])),
        kv_bytes=0,
    )
    # queries of the long row are columns 0 to 3, of the short one 0 and 1: its idle columns do not count
    assert list(line(kept_keys.cache_fill(fill_record(both)), "cached, mean").get_ydata()) == [1, 2, 3, 4]
