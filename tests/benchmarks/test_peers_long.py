"""Steps of all four trainers at a toy length."""

import peers
import peers_long
import pytest


@pytest.mark.slow
def test_all_trainers_sample_as_many_tokens_and_the_table_has_a_line_for_each(monkeypatch):
    pytest.importorskip("trl")
    for name in ("N_PROMPTS", "GROUP_SIZE", "N_TOKENS", "N_WARM"):
        monkeypatch.setattr(peers, name, getattr(peers, name))  # restored after the test
    monkeypatch.setattr(peers_long, "GROUP_SIZE", 2)
    row = peers_long.compare(n_tokens=6, n_layers=1, n_rounds=1)
    assert list(row["trainers"]) == list(peers_long.TRAINERS)
    assert row["trainers"][peers_long.TRL]["times_as_fast"] == 1
    assert all(found["peak_mib"] > 100 for found in row["trainers"].values())
    assert len(peers_long.table([row]).splitlines()) == 2 + len(peers_long.TRAINERS)
