import json

import pytest
import torch
from matplotlib.collections import PolyCollection

from lit_rlkv.reporting.eviction_record import eviction_record, lifetimes_record
from lit_rlkv.reporting.plots import kept_keys, style
from tests.hand_built import one_row
from tests.reporting.plots.drawn import NOTHING, TWO_HEADS, N
from tests.reporting.reports import make_rollout


def drawn(rollout, token_labels=None):
    return kept_keys.key_lifetimes(lifetimes_record(rollout, 0, token_labels)).axes


def labels(axes):
    return [text.get_text() for text in axes.get_yticklabels()]


def bars(axes):
    """(key, birth, end, whether it is blue) of each bar of a panel of lifetimes."""
    (collection,) = (found for found in axes.collections if isinstance(found, PolyCollection))
    blue = tuple(PolyCollection([], facecolors=[style.BLUE]).get_facecolor()[0])
    found = []
    for path, color in zip(collection.get_paths(), collection.get_facecolors(), strict=True):
        x, y = path.vertices[:, 0], path.vertices[:, 1]
        found.append((int(y.min()), x.min(), x.max(), tuple(color) == blue))
    return found


def test_lifetimes_run_from_birth_to_eviction_without_the_padding():
    first, second = drawn(TWO_HEADS)
    # tokens 0 to 3 stand in columns 1 to 4; the query of column 4 is token 3; the fifth token has no key yet
    assert bars(first) == [(0, 0, 4, True), (1, 1, 3, False), (2, 2, 4, True), (3, 3, 4, True)]
    assert bars(second) == [(0, 0, 3, False), (1, 1, 3, False), (2, 2, 4, True), (3, 3, 4, True)]
    assert bars(drawn(NOTHING)[0]) == []


def test_tokens_are_written_as_signs_beside_every_row_of_short_sequences_only():
    tokens = [" a", "\n", "\x1b$x$", "internationally", "<eos>"]
    assert labels(drawn(TWO_HEADS, tokens)[0]) == ["␣a", "⏎", "\\x1b$x$", "internati…"]
    two_layers = one_row([[[0, N, 4, N, N, N]], [[0, 4, 4, N, N, N]]])
    assert [labels(axes) for axes in drawn(two_layers, list("1+2=3"))] == [["1", "+", "2", "="]] * 2
    seq = kept_keys.MAX_LABELLED_TOKENS + 1
    assert "x" not in labels(drawn(one_row(torch.full((1, 1, seq), N), n_pad=0), ["x"] * seq)[0])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_the_record_of_a_rollout_is_of_its_longest_sequence_and_survives_json(order):
    # The first row has six tokens, the second five; the last token has no key.
    record = eviction_record(make_rollout().rows(torch.tensor(order)), str)
    assert json.loads(json.dumps(record)) == record
    lifetimes = record["lifetimes"]
    assert (lifetimes["n_keys"], lifetimes["n_prompt"]) == (5, 3)
    assert lifetimes["labels"] == ["0", "1", "2", "3", "4"]
    assert lifetimes["evicted_at"] == [[[None] * 5] * 2]
    # Columns of the second row are numbered from its first token, which is column 1.
    assert lifetimes_record(make_rollout(), 1)["evicted_at"] == [[[None] * 4, [None, 3, None, None]]]
