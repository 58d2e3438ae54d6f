import re
from pathlib import Path

import long_prompts
import record
from transformers import LlamaConfig

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "turns-and-long-prompts.md"

SMALL = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=4096,
)


def test_memory_of_chunks_does_not_grow_with_the_prompt_and_that_of_one_piece_does():
    def peak(n_tokens: int, chunk: int | None) -> float:
        return long_prompts.measure("rollout", n_tokens, chunk, SMALL)["allocated_mib"]

    assert peak(2000, 128) < 1.3 * peak(500, 128)  # tokens and the table grow
    assert peak(2000, None) > 5 * peak(500, None)


def test_the_learner_and_both_times_are_measured():
    assert long_prompts.measure("learner", 64, 32, SMALL)["allocated_mib"] > 0
    seconds = long_prompts.measure("time", 64, 32, SMALL)["cpu_seconds"]
    assert set(seconds) == set(long_prompts.WAYS)


def test_the_page_shows_what_the_last_run_measured():
    page = PAGE.read_text(encoding="utf-8")
    for table in long_prompts.tables(record.rows(long_prompts.NAME)).split("\n\n"):
        for line in table.splitlines()[1:]:
            assert "| " + " | ".join(re.split(r"\s{2,}", line.strip())) + " |" in page
