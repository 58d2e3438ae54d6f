import pytest
import torch
from matplotlib.collections import PolyCollection

from lit_rlkv.reporting import plots
from tests.reporting.plots.drawn import TWO_HEADS, N, make_rollout


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


def test_lifetimes_run_from_birth_to_eviction_without_the_padding():
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
    evicted_at = torch.full((10, 7, 6), N)
    titles = [axes.get_title(loc="left") for axes in plots.key_lifetimes(make_rollout(evicted_at), 0).axes]
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
