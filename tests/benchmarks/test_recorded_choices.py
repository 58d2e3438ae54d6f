import re
from pathlib import Path

import pytest
import record
import recorded_choices

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "recorded-choices.md"


@pytest.fixture(scope="module")
def figures():
    return recorded_choices.run(0, "float32", "cpu", 2, 32)


def test_replay_is_exact_with_all_records_and_not_without_keys_or_tokens(figures):
    gaps = {name: gap["max"] for name, gap in figures["gaps"].items()}
    assert gaps["all three"] < 1e-4
    assert gaps["all but expert_ids"] < 1e-4  # without rounding no expert flips
    for name in ("all but evicted_at", "all but sampling_masks", "none"):
        assert gaps[name] > 0.05


def test_bytes_are_those_of_the_page(figures):
    found = figures["bytes_per_token"]
    assert found["evicted_at"] == 4 * 6 * 2
    assert found["expert_ids"] == 6 * 8
    assert 4 < found["sampling_masks"] <= 4 * (1 + 50)


def test_the_page_shows_what_the_last_run_measured():
    row = record.rows(recorded_choices.NAME)[-1]
    held, gaps = recorded_choices.tables(row["figures"]).split("\n\n")
    page = PAGE.read_text(encoding="utf-8").replace("`", "")
    for line in gaps.splitlines()[1:]:
        assert "| " + " | ".join(re.split(r"\s{2,}", line)) + " |" in page
    sizes = [line.split()[-1] for line in held.splitlines()[1:]]
    assert f"take {sizes[0]}, {sizes[1]} and {sizes[2]} bytes per token" in page
