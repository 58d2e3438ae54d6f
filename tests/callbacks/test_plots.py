"""Figures: what is drawn is what was measured."""

import numpy as np
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from lit_rlkv.callbacks import plots
from lit_rlkv.types import NEVER, EvalRow, Rollout


def make_rollout(death, n_pad=1, n_prompt=2):
    """One row of `n_pad` padding and `n_prompt` prompt columns; the rest are actions."""
    death = torch.as_tensor(death, dtype=torch.int32)[None]
    seq = death.shape[-1]
    is_token = torch.arange(seq)[None] >= n_pad
    is_action = torch.arange(seq)[None] >= n_pad + n_prompt
    death = death.masked_fill(~is_token[:, None, None], 0)
    return Rollout(torch.zeros(1, seq, dtype=torch.long), is_token, is_action, torch.zeros(1, seq), death, 0)


N = NEVER
TWO_HEADS = make_rollout([[[0, N, 4, N, N, N], [0, 4, 4, N, N, N]]])


def eval_row(cache, budget, accuracy):
    return EvalRow(cache, budget, accuracy, 100, 10.0, 1024, 0.1, 1e-6)


def rewards(values, **others):
    return [
        {"iteration": float(index), "reward": value, **others} for index, value in enumerate(values, start=1)
    ]


def line(figure, label):
    return next(found for found in figure.axes[0].lines if found.get_label() == label)


def labels(figure):
    return [found.get_label() for found in figure.axes[0].lines if not found.get_label().startswith("_")]


def bars(axes):
    """(key, birth, end, color) of each bar of a panel of lifetimes."""
    (collection,) = (found for found in axes.collections if isinstance(found, PolyCollection))
    found = []
    for path, color in zip(collection.get_paths(), collection.get_facecolors(), strict=True):
        x, y = path.vertices[:, 0], path.vertices[:, 1]
        found.append((int(y.min()), x.min(), x.max(), tuple(color)))
    return found


def blue():
    return tuple(PolyCollection([], facecolors=[plots.BLUE]).get_facecolor()[0])


def test_cache_fill_counts_births_less_deaths():
    figure = plots.cache_fill(TWO_HEADS, budget=2, interval=1)
    live, dense = line(figure, "live, mean"), line(figure, "dense, mean")
    # queries are columns 1 to 4: the last token was never one; the response begins at column 3
    assert list(live.get_xdata()) == [-2, -1, 0, 1]
    # at column 4, head 0 has lost one of four keys and head 1 two: (3 + 2) / 2
    assert list(live.get_ydata()) == [1, 2, 3, 2.5]
    assert list(dense.get_ydata()) == [1, 2, 3, 4]
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    assert sorted(set(band[band[:, 0] == 1, 1])) == [2, 3]


def test_cache_fill_notices_a_death_that_comes_one_query_late():
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
    is_token = torch.stack([(column >= start) & (column < end) for start, end in ((0, 23), (5, 20), (3, 9))])
    death = (column + torch.randint(1, 30, (3, 2, 4, seq))).int().masked_fill(~is_token[:, None, None], 0)
    rollout = Rollout(torch.zeros(3, seq).long(), is_token, is_token, torch.zeros(3, seq), death, 0)
    is_live = (column[None, :] <= column[:, None]) & (death[..., None, :] > column[:, None])
    expected = (is_live & is_token[:, None, None, None]).sum(-1)
    assert torch.equal(plots.live_keys(rollout), expected)
    is_live_late = (column[None, :] <= column[:, None]) & (death[..., None, :] >= column[:, None])
    assert not torch.equal((is_live_late & is_token[:, None, None, None]).sum(-1), expected)


def test_cache_fill_averages_only_over_rows_that_still_write():
    rollout = make_rollout([[[N, N, N, N, N]]], n_pad=0)
    ends_early = torch.tensor([[True, True, True, False, False]])
    both = Rollout(
        token_ids=rollout.token_ids.repeat(2, 1),
        is_token=torch.cat([rollout.is_token, ends_early]),
        is_action=torch.cat([rollout.is_action, rollout.is_action & ends_early]),
        sampler_logps=torch.zeros(2, 5),
        death=torch.cat([rollout.death, torch.where(ends_early, N, 0).int()[:, None, None]]),
        kv_bytes=0,
    )
    # queries of the long row are columns 0 to 3, of the short one 0 and 1: its idle columns do not count
    assert list(line(plots.cache_fill(both), "live, mean").get_ydata()) == [1, 2, 3, 4]


def test_lifetimes_run_from_birth_to_death_without_the_padding():
    first, second = plots.key_lifetimes(TWO_HEADS, row=0).axes
    # tokens 0 to 3 stand in columns 1 to 4; the query of column 4 is token 3; the fifth token has no key yet
    assert [bar[:3] for bar in bars(first)] == [(0, 0, 4), (1, 1, 3), (2, 2, 4), (3, 3, 4)]
    assert [bar[:3] for bar in bars(second)] == [(0, 0, 3), (1, 1, 3), (2, 2, 4), (3, 3, 4)]
    assert [bar[3] == blue() for bar in bars(first)] == [True, False, True, True]
    assert [bar[3] == blue() for bar in bars(second)] == [False, False, True, True]


def test_lifetimes_mark_where_the_response_begins():
    axes = plots.key_lifetimes(TWO_HEADS, row=0).axes[0]
    (border,) = (found for found in axes.lines if found.get_label() == "response begins")
    assert list(border.get_xdata()) == [2, 2]


def test_many_layers_and_heads_are_thinned_evenly():
    death = torch.full((10, 7, 6), N)
    titles = [axes.get_title(loc="left") for axes in plots.key_lifetimes(make_rollout(death), 0).axes]
    assert titles[:4] == [f"layer 0 · head {head}" for head in (0, 2, 4, 6)]
    assert titles[::4] == [f"layer {layer} · head 0" for layer in (0, 3, 6, 9)]


def test_tokens_are_written_beside_short_sequences_only():
    texts = plots.key_lifetimes(TWO_HEADS, 0, list("1+2=3")).axes[0].get_yticklabels()
    assert [text.get_text() for text in texts] == ["1", "+", "2", "="]
    seq = plots.MAX_LABELLED_TOKENS + 1
    long = make_rollout(torch.full((1, 1, seq), N), n_pad=0)
    texts = plots.key_lifetimes(long, 0, ["x"] * seq).axes[0].get_yticklabels()
    assert "x" not in {text.get_text() for text in texts}


def test_tokens_that_cannot_be_seen_are_written_as_signs():
    figure = plots.key_lifetimes(TWO_HEADS, 0, [" a", "\n", "\x1b$x$", "internationally", "<eos>"])
    texts = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert texts == ["␣a", "⏎", "\\x1b$x$", "internati…"]


def test_lifetimes_refuse_a_row_or_labels_that_do_not_fit():
    with pytest.raises(ValueError, match="row=1 is not in a rollout of 1"):
        plots.key_lifetimes(TWO_HEADS, row=1)
    with pytest.raises(ValueError, match="2 token_labels for 5 tokens"):
        plots.key_lifetimes(TWO_HEADS, row=0, token_labels=["a", "b"])


def test_reward_is_averaged_over_the_last_iterations():
    figure = plots.reward_curve(rewards([0.0] * 10 + [1.0] * 5))
    smooth = line(figure, f"mean of the last {plots.SMOOTHING}").get_ydata()
    assert smooth[9] == 0.0
    assert smooth[10] == pytest.approx(0.1)
    assert smooth[14] == pytest.approx(0.5)
    assert list(line(figure, "each iteration").get_ydata()) == [0.0] * 10 + [1.0] * 5
    assert len(figure.axes[0].collections) == 0


def test_reward_has_a_band_where_its_spread_was_logged():
    figure = plots.reward_curve(rewards([0.5, 0.5], reward_std=0.2))
    (band,) = figure.axes[0].collections
    height = band.get_paths()[0].vertices[:, 1]
    assert (height.min(), height.max()) == pytest.approx((0.3, 0.7))


def test_an_iteration_without_the_metric_is_left_out():
    history = [{"iteration": 1, "reward": 0.1}, {"iteration": 2}, {"iteration": 3, "reward": float("nan")}]
    iteration, value = plots.series([*history, {"iteration": 4, "reward": 0.4}], "reward")
    assert list(iteration) == [1, 4]
    assert list(value) == [0.1, 0.4]


def test_proxy_and_gold_share_their_iterations_on_axes_of_their_own():
    history = [
        {"iteration": index + 1, "rewards/learned": float(index), "rewards/exact_match": 0.5}
        for index in range(4)
    ]
    figure = plots.proxy_and_gold(history)
    gold, proxy = figure.axes
    assert list(gold.lines[0].get_ydata()) == [0.5] * 4
    assert list(proxy.lines[0].get_ydata()) == [0.0, 1.0, 2.0, 3.0]
    assert list(proxy.lines[1].get_ydata()) == [0.0, 0.5, 1.0, 1.5]  # the mean so far
    assert list(proxy.lines[0].get_xdata()) == list(gold.lines[0].get_xdata()) == [1, 2, 3, 4]
    assert labels(figure) == ["gold, left axis", "proxy, right axis"]


def test_preferences_without_a_verifier_have_a_proxy_only():
    figure = plots.proxy_and_gold([{"iteration": 1, "rewards/learned": 2.0}])
    assert list(figure.axes[1].lines[0].get_ydata()) == [2.0]
    assert labels(figure) == ["proxy, right axis"]


def test_accuracy_is_drawn_in_the_order_of_budgets_and_dense_as_a_level():
    before = [eval_row("dense", None, 0.99), eval_row("random 16", 16, 0.46), eval_row("random 12", 12, 0.2)]
    after = [eval_row("dense", None, 0.98), eval_row("random 16", 16, 0.81)]
    figure = plots.accuracy_against_budget(before, after)
    assert list(line(figure, "before").get_xdata()) == [12, 16]
    assert list(line(figure, "before").get_ydata()) == [0.2, 0.46]
    assert list(line(figure, "after").get_ydata()) == [0.81]
    assert line(figure, "dense, before").get_ydata()[0] == 0.99
    assert line(figure, "dense, after").get_ydata()[0] == 0.98


def test_a_single_evaluation_has_no_before_and_after():
    figure = plots.accuracy_against_budget([], [eval_row("dense", None, 0.9), eval_row("h2o 8", 8, 0.5)])
    assert labels(figure) == ["under the budget", "dense"]


def test_mismatch_shows_what_was_logged_on_a_log_axis():
    history = [
        {"iteration": 1, "rollout_corr/kl": 0.1, "kv/replay_gap": 0.0},
        {"iteration": 2, "rollout_corr/kl": -0.02, "kv/replay_gap": 0.0},
        {"iteration": 3, "rollout_corr/kl": 0.0, "kv/replay_gap": 0.0},
    ]
    figure = plots.mismatch(history)
    kl = plots.MISMATCHES["rollout_corr/kl"]
    assert figure.axes[0].get_yscale() == "log"
    np.testing.assert_array_equal(line(figure, kl).get_ydata(), [0.1, 0.02, np.nan])
    assert list(line(figure, f"{kl}, negative").get_xdata()) == [2]
    assert labels(figure) == [kl, f"{kl}, negative", "replay gap: 0 throughout"]


def test_stages_are_bars_of_their_seconds():
    axes = plots.time_per_stage({"sft": 95.0, "rl": 12.5}).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [95.0, 12.5]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["sft", "rl"]


def test_reliability_draws_what_was_observed_against_what_was_predicted():
    axes = plots.reliability([0.04, 0.5, 0.97], [0.0, 0.25, 1.0], [6, 4, 10]).axes[0]
    diagonal, head = axes.lines
    assert list(head.get_xdata()) == [0.04, 0.5, 0.97]
    assert list(head.get_ydata()) == [0.0, 0.25, 1.0]
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [0, 1]
    assert [bar.get_height() for bar in axes.patches] == [0.3, 0.2, 0.5]


def test_reliability_bars_stand_in_their_bins():
    # A mean confidence of 1 - 1e-17 is 1 in floating point, and still of the bin from 0.9 to 1.
    bars = plots.reliability([0.09, 0.11, 1.0], [0.0, 0.5, 1.0], [1, 1, 1]).axes[0].patches
    centres = [bar.get_x() + bar.get_width() / 2 for bar in bars]
    assert centres == pytest.approx([0.05, 0.15, 0.95])


NOTHING = make_rollout(torch.zeros(1, 1, 3), n_pad=3)


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (lambda: plots.reward_curve([]), "no reward was logged"),
        (lambda: plots.mismatch([{"iteration": 1, "reward": 0.5}]), "no mismatch was logged"),
        (lambda: plots.accuracy_against_budget([], []), "no evaluation was run"),
        (lambda: plots.time_per_stage({}), "no stage was timed"),
        (lambda: plots.proxy_and_gold(rewards([0.5])), "no reward model was asked"),
        (lambda: plots.reliability([], [], []), "no pairs were scored"),
        (lambda: plots.cache_fill(NOTHING), "the rollout is empty"),
    ],
)
def test_a_figure_without_data_says_so(draw, reason):
    figure = draw()
    assert isinstance(figure, Figure)
    assert [text.get_text() for text in figure.axes[0].texts] == [reason]


@pytest.mark.parametrize(
    "draw", [lambda: plots.cache_fill(TWO_HEADS), lambda: plots.key_lifetimes(NOTHING, 0)]
)
def test_figures_render(draw, tmp_path):
    draw().savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
