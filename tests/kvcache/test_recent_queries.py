"""The ring buffer of recent queries, against the queries themselves."""

import pytest
import torch

from lit_rlkv.kvcache.feed import Feed
from lit_rlkv.kvcache.recent_queries import RecentQueries

WINDOW, N_STEPS = 3, 5


def feed_of(rows: torch.Tensor, newest: torch.Tensor, is_token: torch.Tensor) -> Feed:
    """A feed of tokens up to column `newest`, each row of them for `len(rows) / batch` rows."""
    n_new, nothing = is_token.sum(dim=1), torch.zeros(len(is_token), dtype=torch.long)
    return Feed(
        rows=rows,
        span=None,
        is_token=is_token,
        n_new=n_new,
        n_held=newest + 1 - n_new,
        n_kept=newest + 1,
        most_held=int((newest + 1 - n_new).max()),
        is_padded=True,
        first=nothing,
        newest=newest,
        is_due=nothing.bool(),
        due=None,
    )


@pytest.mark.parametrize("n_prompt", [1, 3, 7])
@pytest.mark.parametrize("n_late", [0, 1])
def test_the_last_queries_of_each_row_are_read_with_their_columns(n_prompt: int, n_late: int):
    # Two prompts with two rows each; `n_late` lets two of the rows fall behind by a column.
    n_columns = n_prompt + N_STEPS
    queries = torch.randn(4, 2, 2, n_columns + n_late, 5)  # [row, kv_head, group, column, dim]
    queries[1::2, :, :, :n_prompt] = queries[::2, :, :, :n_prompt]
    rows = torch.tensor([3, 1, 0, 2])  # rows 3 and 1 are of the first prompt
    recent = RecentQueries(queries, n_rows=4, window=WINDOW)
    prompts = torch.ones(2, n_prompt, dtype=torch.bool)
    recent.write_feed(feed_of(rows, torch.full((2,), n_prompt - 1), prompts), queries[::2, :, :, :n_prompt])
    queries = queries[rows.argsort()]
    newest = torch.full((4,), n_prompt - 1)
    for step in range(N_STEPS):
        newest = newest + (1 if step > 0 or n_late == 0 else torch.tensor([1, 0, 1, 0]))
        recent.write(newest, queries[torch.arange(4), :, :, newest])
    chosen = torch.tensor([2, 0, 3])
    found, columns = recent.read(chosen, newest[chosen])
    for place, row in enumerate(chosen.tolist()):
        last = int(newest[row])
        assert sorted(columns[place].tolist()) == [last - 2, last - 1, last]
        assert torch.equal(found[place], queries[row][:, :, columns[place]])
    _, of_the_column_before = recent.read(chosen, newest[chosen] - 1)
    assert not torch.equal(of_the_column_before, columns)


@pytest.mark.parametrize("n_new", [(1, 2), (2, 5), (4, 3)])
def test_given_tokens_take_the_places_of_the_oldest_queries(n_new: tuple[int, int]):
    n_prompt, width = 4, max(n_new)
    queries = torch.randn(2, 2, 2, n_prompt + width, 5)
    recent = RecentQueries(queries, n_rows=2, window=WINDOW)
    rows, before = torch.arange(2), torch.full((2,), n_prompt - 1)
    recent.write_feed(feed_of(rows, before, torch.ones(2, n_prompt, dtype=torch.bool)), queries[..., :4, :])
    newest = before + torch.tensor(n_new)
    given = torch.full_like(queries[..., :width, :], torch.nan)  # left-padded
    for row, n in enumerate(n_new):
        given[row, :, :, width - n :] = queries[row, :, :, n_prompt : n_prompt + n]
    is_token = torch.arange(width) >= width - torch.tensor(n_new)[:, None]
    recent.write_feed(feed_of(rows, newest, is_token), given)
    found, columns = recent.read(rows, newest)
    for row in range(2):
        assert torch.equal(found[row], queries[row][:, :, columns[row]])
