import numpy as np
import pytest

from lit_rlkv.reporting import plots

CACHE = {
    "iteration": 11,
    "name": "cache",
    "attention_kept": [[0.9, 0.8], [0.5, 1.0], [0.7, 0.6]],
    "attention_kept_p05": [[0.4, 0.3], [0.1, 1.0], [0.2, 0.2]],
    "position": [0, 1, 2],
    "attention_on_dead": [[0.0, 0.1, 0.3], [0.0, 0.2, 0.5], [0.0, 0.3, 0.1]],
    "lifetime_edges": [1, 3, 5],
    "lifetime_counts": [3, 1],
    "lifetime_median": [[2.0, None], [4.0, 1.0], [2.0, 3.0]],
}


def tables(figure):
    return [np.array(axes.images[0].get_array()) for axes in figure.axes if axes.images]


def test_attention_is_a_cell_for_each_layer_and_head():
    figure = plots.attention_kept(CACHE)
    mean, low = tables(figure)[:2]
    assert mean.tolist() == CACHE["attention_kept"]
    assert low.tolist() == CACHE["attention_kept_p05"]
    written = {text.get_position(): text.get_text() for text in figure.axes[0].texts}
    assert written[0, 1] == "50%"  # head 0 of layer 1
    assert figure.axes[0].images[0].get_clim() == (0.0, 1.0)  # the same colours in every run


def test_large_tables_are_colours_alone():
    large = {**CACHE, "attention_kept": [[0.5] * 32] * 28, "attention_kept_p05": [[0.5] * 32] * 28}
    assert list(plots.attention_kept(large).axes[0].texts) == []


def test_attention_on_dead_keys_shows_mean_spread_and_the_worst_layer():
    axes = plots.attention_on_dead(CACHE).axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["their mean"] == pytest.approx([0.0, 0.2, 0.3])
    assert lines["layer 1, the highest"] == [0.0, 0.2, 0.5]
    band = axes.collections[0].get_paths()[0].vertices
    assert sorted(set(band[band[:, 0] == 2, 1])) == [0.1, 0.5]


def test_ages_are_shares_on_their_own_tokens():
    figure = plots.ages_at_eviction(CACHE)
    bars = figure.axes[0].patches
    assert [bar.get_height() for bar in bars] == [0.75, 0.25]
    assert [(bar.get_x(), bar.get_width()) for bar in bars] == [(0.5, 2), (2.5, 2)]  # ages 1, 2 and 3, 4
    (medians,) = tables(figure)[:1]
    assert np.isnan(medians[0, 1])
    assert medians[1].tolist() == [4.0, 1.0]


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (plots.attention_kept, "no attention was measured"),
        (plots.attention_on_dead, "no attention was measured"),
        (plots.ages_at_eviction, "no key was evicted"),
    ],
)
@pytest.mark.parametrize("measured", [None, {"iteration": 1, "name": "cache"}])
def test_a_picture_without_data_says_so(draw, reason, measured, tmp_path):
    figure = draw(measured)
    assert [text.get_text() for text in figure.axes[0].texts] == [reason]
    figure.savefig(tmp_path / "figure.png")
