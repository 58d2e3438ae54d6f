"""The ring buffer of recent queries, against the queries themselves."""

import pytest
import torch

from lit_rlkv.kvcache.recent_queries import RecentQueries

WINDOW, N_STEPS = 3, 5


@pytest.mark.parametrize("n_prompt", [1, 3, 7])
@pytest.mark.parametrize("n_late", [0, 1])
def test_the_last_queries_of_each_row_are_read_with_their_columns(n_prompt: int, n_late: int):
    # Two prompts with two rows each; `n_late` lets two of the rows fall behind by a column.
    n_columns = n_prompt + N_STEPS
    queries = torch.randn(4, 2, 2, n_columns + n_late, 5)  # [row, kv_head, group, column, dim]
    queries[1::2, :, :, :n_prompt] = queries[::2, :, :, :n_prompt]
    rows = torch.tensor([3, 1, 0, 2])  # rows 3 and 1 are of the first prompt
    recent = RecentQueries(queries, n_rows=4, window=WINDOW)
    recent.write_prompts(rows, queries[::2, :, :, :n_prompt])
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
